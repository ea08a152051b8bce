"""What a checkpoint holds, and how it is found: tensors in safetensors, everything else in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from grappe.checkpoint.commit import MANIFEST, read_json, verify
from grappe.checkpoint.tensor_file import TensorFiles
from grappe.weights import Under, Weights, agreed

STATE = "state.json"
MODEL, OPTIMIZER, LOCAL = "model.", "optimizer.", "local."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint on disk."""

    folder: Path
    step: int
    """Optimizer steps done when it was saved."""

    @property
    def tensors(self) -> TensorFiles:
        """Its tensors, read when asked for."""
        names = read_json(self.folder / MANIFEST).get("files", {})
        return TensorFiles([self.folder / name for name in sorted(names) if name.endswith(".safetensors")])

    @property
    def values(self) -> dict[str, Any]:
        """Its JSON."""
        return read_json(self.folder / STATE)

    @property
    def model(self) -> ModelWeights:
        """The model's parameters and buffers, as one model."""
        return ModelWeights(self.tensors)


class ModelWeights:
    """A model's parameters, and its buffers: the mean of the processes' own where they differ.

    Names: `model.NAME` for parameters, `local.SLICE.NAME` for buffers.
    """

    def __init__(self, tensors: Weights) -> None:
        self._parameters = Under(tensors, MODEL)
        self._tensors = tensors
        self._buffers: dict[str, list[str]] = {}
        for full in tensors:
            if full.startswith(LOCAL):
                name = full.removeprefix(LOCAL).partition(".")[2]
                self._buffers.setdefault(name, []).append(full)

    def __contains__(self, name: str) -> bool:
        return name in self._buffers or name in self._parameters

    def __iter__(self) -> Iterator[str]:
        yield from self._parameters
        yield from self._buffers

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._buffers:
            return self._tensors.shape(self._buffers[name][0])
        return self._parameters.shape(name)

    def read(self, name: str) -> Tensor:
        if name not in self._buffers:
            return self._parameters.read(name)
        return agreed([self._tensors.read(full) for full in sorted(self._buffers[name])])

    def read_part(self, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        return self._parameters.read_part(name, shape, offset)


def found(folder: Path) -> list[Checkpoint]:
    """The committed checkpoints in `folder`, newest first; not yet verified."""
    checkpoints = []
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    for entry in entries:
        prefix, _, number = entry.name.partition("-")
        if prefix == "step" and number.isdecimal() and number.isascii() and entry.is_dir():
            step = int(number)
            if entry == step_folder(folder, step):  # a step has one name
                checkpoints.append(Checkpoint(folder=entry, step=step))
    return sorted(checkpoints, key=lambda one: one.step, reverse=True)


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies: never a pointer, never a guess."""
    return next((one for one in found(folder) if verify(one.folder) is None), None)


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is committed."""
    return folder / f"step-{step:06d}"
