"""Chooses each step's samples, the same for any number of processes, and loads them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grappe.data.corpus.corpus import Corpus
    from grappe.data.corpus.mixture import Mixture
    from grappe.data.corpus.tokenizing import tokenize
    from grappe.data.corpus.tokens import Packed, Windows, check_packing, document_mask
    from grappe.data.images.dataset import Images
    from grappe.data.images.decode import CentreCrop, Normalise, RandomResizedCrop
    from grappe.data.staging import stage
    from grappe.data.stream import Stream

__all__ = [
    "CentreCrop",
    "Corpus",
    "Images",
    "Mixture",
    "Normalise",
    "Packed",
    "RandomResizedCrop",
    "Stream",
    "Windows",
    "check_packing",
    "document_mask",
    "stage",
    "tokenize",
]

# What needs torch is imported when it is first used, so that `grappe --help` is quick.
_LAZY = {
    "CentreCrop": "grappe.data.images.decode",
    "Corpus": "grappe.data.corpus.corpus",
    "Images": "grappe.data.images.dataset",
    "Mixture": "grappe.data.corpus.mixture",
    "Normalise": "grappe.data.images.decode",
    "Packed": "grappe.data.corpus.tokens",
    "RandomResizedCrop": "grappe.data.images.decode",
    "Stream": "grappe.data.stream",
    "Windows": "grappe.data.corpus.tokens",
    "check_packing": "grappe.data.corpus.tokens",
    "document_mask": "grappe.data.corpus.tokens",
    "stage": "grappe.data.staging",
    "tokenize": "grappe.data.corpus.tokenizing",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'grappe.data' has no attribute '{name}'")
