"""Reads weights that grappe did not write: safetensors, or a state dict that torch reads as weights only."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grappe.checkpoint.format import refuse_package
from grappe.checkpoint.tensor_file import TensorFiles
from grappe.checkpoint.weights import InMemory, Weights
from grappe.errors import RunError

PICKLED = (".ckpt", ".pt", ".pth", ".bin")
ALONE = "save the weights alone: torch.save(model.state_dict(), FILE)"
KEYS = ("state_dict", "model_state_dict", "model", "net", "network", "weights")
"""Keys under which scripts save a model's weights, besides the optimizer and the epoch."""
MAGIC = (b"PK", b"\x80")
"""How a file of torch.save begins: a zip archive, or an old pickle."""


def foreign_weights(file: Path) -> Weights:
    """Reads the weights in a .safetensors file, a Lightning .ckpt, or a .pt state dict.

    A pickle is only read through torch's `weights_only` unpickler, which makes tensors and plain containers, and
    runs nothing.

    Raises:
        RunError: the file is missing, damaged, or holds more than weights.
    """
    refuse_package(file)
    if not file.is_file():
        raise RunError(f"--from {file}: there is no such run or file")
    if file.suffix == ".safetensors":
        weights = TensorFiles([file.resolve()], levels=1)  # the user named it: it may be a link
        if weights.has_pieces:
            raise RunError(f"--from {file}: this is only one part of a grappe checkpoint: give the run's folder")
        return weights
    if file.suffix not in PICKLED:
        with file.open("rb") as stream:
            saved_by_torch = stream.read(2).startswith(MAGIC)
        if not saved_by_torch:
            raise RunError(
                f"--from {file}: give a run's folder, a .safetensors file, or what torch.save wrote (.ckpt, .pt)"
            )
    return InMemory(state_dict_of(read_content(file), file))


def read_content(file: Path) -> Any:
    """Reads what torch.save wrote, as tensors and plain containers only.

    Raises:
        RunError: the file is damaged, or holds more than those.
    """
    try:
        zipped = zipfile.is_zipfile(file)
        if zipped:
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise RunError("it is compressed, which torch's own files never are")
        # Mapped, tensors that are not read (the optimizer's state) cost no memory.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except MemoryError as error:
        raise RunError(f"--from {file}: it needs more memory than the model's weights may: {ALONE}") from error
    except Exception as error:  # torch raises many kinds for a damaged or hostile file
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0][:300]
        raise RunError(f"--from {file}: it holds more than weights, or is damaged: {reason}") from error


def state_dict_of(content: Any, file: Path) -> dict[str, Tensor]:
    """Returns the model's weights in the content of a file.

    Raises:
        RunError: there are none.
    """
    if isinstance(content, dict):
        content = next((content[key] for key in KEYS if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise RunError(f"--from {file}: there is no state dict in it, only {type(content).__name__}")
    for name, value in content.items():
        if (why := not_plain(value)) is not None:
            raise RunError(f"--from {file}: {name!r} is {why}: weights are plain tensors: {ALONE}")
    return content


def not_plain(tensor: Tensor) -> str | None:
    """Names the kind of a tensor that is not a plain one in memory; None for a plain one."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"of the class {type(tensor).__name__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return f"of the layout {str(tensor.layout).removeprefix('torch.')}"
    return f"on the device {tensor.device.type}" if tensor.device.type != "cpu" else None
