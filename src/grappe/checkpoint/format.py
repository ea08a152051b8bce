"""What a checkpoint holds: whole tensors in safetensors, everything else in JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from grappe.checkpoint.commit import committed, read_json, verify
from grappe.weights import InFiles, whole
from grappe.world import World

TENSORS = "tensors.safetensors"
STATE = "state.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint on disk."""

    folder: Path
    step: int
    """Optimizer steps done when it was saved."""

    @property
    def tensors(self) -> InFiles:
        """Its tensors, read when asked for."""
        return InFiles([self.folder / TENSORS])

    @property
    def values(self) -> dict[str, Any]:
        """Its JSON."""
        return read_json(self.folder / STATE)


def save(
    folder: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], world: World
) -> Path:
    """Writes a checkpoint from process 0; all come back once it is committed. Collective.

    Sharded tensors are made whole one at a time.
    """
    gathered = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if world.rank == 0:
            gathered[name] = full.contiguous()
    target = folder / f"step-{step:06d}"
    error: str | None = None
    if world.rank == 0:
        try:
            _write(target, step, gathered, values)
        except OSError as problem:
            error = f"{target} cannot be written: {problem}"
    error = world.share(error)
    if error is not None:
        raise OSError(error)
    return target


def _write(target: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    with committed(target) as beside:
        save_file(_unshared(tensors), os.fspath(beside / TENSORS))
        (beside / STATE).write_text(json.dumps({"step": step, **values}, indent=1))


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result


def found(folder: Path) -> list[Checkpoint]:
    """The committed checkpoints in `folder`, newest first; not yet verified."""
    checkpoints = []
    for entry in _entries(folder):
        prefix, _, number = entry.name.partition("-")
        if prefix == "step" and number.isdigit() and entry.is_dir():
            checkpoints.append(Checkpoint(folder=entry, step=int(number)))
    return sorted(checkpoints, key=lambda one: one.step, reverse=True)


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies: never a pointer, never a guess."""
    return next((one for one in found(folder) if verify(one.folder) is None), None)


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
