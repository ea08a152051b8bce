"""What a checkpoint holds, and how it is found: tensors in safetensors, everything else in JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.checkpoint.commit import MANIFEST, read_json, verify

if TYPE_CHECKING:
    from grappe.checkpoint.model_weights import ModelWeights
    from grappe.checkpoint.tensor_file import TensorFiles

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
        from grappe.checkpoint.tensor_file import TensorFiles

        names = read_json(self.folder / MANIFEST).get("files", {})
        return TensorFiles([self.folder / name for name in sorted(names) if name.endswith(".safetensors")])

    @property
    def values(self) -> dict[str, Any]:
        """Its JSON."""
        return read_json(self.folder / STATE)

    @property
    def model(self) -> ModelWeights:
        """The model's parameters and buffers, as one model."""
        from grappe.checkpoint.model_weights import ModelWeights

        return ModelWeights(self.tensors)


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
