"""Reads weights that grappe did not write: safetensors, or a state dict that torch reads as weights only."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grappe.checkpoint.tensor_file import TensorFiles
from grappe.checkpoint.weights import InMemory, Under, Weights
from grappe.errors import RunError

PICKLED = (".ckpt", ".pt", ".pth", ".bin")
PREFIXES = ("module.", "model.", "_orig_mod.", "net.", "_forward_module.")


def foreign_weights(file: Path) -> Weights:
    """Reads the weights in a .safetensors file, a Lightning .ckpt, or a .pt state dict.

    A pickle is only read through torch's `weights_only` unpickler, which makes tensors and plain containers, and
    runs nothing.

    Raises:
        RunError: the file is missing, damaged, or holds more than weights.
    """
    if not file.is_file():
        raise RunError(f"--from {file}: there is no such run or file")
    if file.suffix == ".safetensors":
        found = TensorFiles([file.resolve()], levels=1)  # the user named it, be it by a link
        return Under(found, _wrapping(found))
    if file.suffix not in PICKLED:
        raise RunError(
            f"--from {file}: give a run's folder, or a file that ends in .safetensors, .ckpt or .pt"
        )
    found = InMemory(_state_dict(file))
    return Under(found, _wrapping(found))


def _state_dict(file: Path) -> dict[str, Tensor]:
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise RunError("it is compressed, which torch's own files never are")
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or hostile file
        reason = str(error).partition("\n")[0]
        raise RunError(f"--from {file}: it holds more than weights, or is damaged: {reason}") from error
    if isinstance(content, dict):
        content = content.get("state_dict", content.get("model", content))
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise RunError(f"--from {file}: there is no state dict in it, only {type(content).__name__}")
    return content


def _wrapping(names: Iterable[str]) -> str:
    """Returns the prefix that DDP, Lightning or torch.compile put before all names; two wrappers make one prefix."""
    found, names = "", list(names)
    while prefix := next((p for p in PREFIXES if names and all(n.startswith(found + p) for n in names)), ""):
        found += prefix
    return found
