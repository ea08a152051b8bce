"""Computes a dataset's fingerprint, its length and a hash of three samples, to notice another dataset on resuming."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from grappe.data.seeded import SeededDataset
from grappe.errors import TaskError
from grappe.errors.user_code import calls_users, sentence
from grappe.private_api.torch import tree_flatten


def fingerprint(dataset: Dataset[Any]) -> str:
    """Returns `LENGTH-HASH`, the hash over the first, middle and last sample, drawn as for epoch 0 and seed 0."""
    length = len(dataset)  # type: ignore[arg-type]
    digest = xxhash.xxh3_64()
    seeded = SeededDataset(dataset, seed=0)
    try:
        samples = seeded.__getitems__([(0, 0), (0, length // 2), (0, length - 1)])
    except IndexError as error:
        raise TaskError(
            f"data() says that it has {length} samples, and gives none for an index below that: is __len__ right? "
            f"{sentence(error)}"
        ) from error
    for sample in samples:
        for leaf in tree_flatten(sample)[0]:
            digest.update(_bytes(leaf))
    return f"{length}-{digest.hexdigest()}"


@calls_users("a sample of data()")
def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if leaf.numel() else b""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.tobytes() if leaf.dtype != object else str(leaf.shape).encode()
    if isinstance(leaf, bytes | str | int | float | bool):
        return repr(leaf).encode()
    return type(leaf).__qualname__.encode()  # an image, say: its class must do
