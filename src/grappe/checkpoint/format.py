"""Finds checkpoints on disk and reads them: tensors in safetensors, everything else in JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.checkpoint.commit import MANIFEST, read_json, step_name, verify
from grappe.launch import files
from grappe.launch.files import IN_CHECKPOINT, IN_RUN

if TYPE_CHECKING:
    from grappe.checkpoint.model_weights import ModelWeights
    from grappe.checkpoint.tensor_file import TensorFiles

STATE = "state.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint on disk."""

    folder: Path
    step: int
    """Optimizer steps done when the checkpoint was saved."""

    def read_tensors(self) -> TensorFiles:
        """Opens the checkpoint's files and checks their headers; each tensor is read when it is requested."""
        from grappe.checkpoint.tensor_file import TensorFiles

        names = read_json(self.folder / MANIFEST, IN_CHECKPOINT).get("files", {})
        return TensorFiles([self.folder / name for name in sorted(names) if name.endswith(".safetensors")])

    def read_values(self) -> dict[str, Any]:
        """Reads the checkpoint's JSON."""
        return read_json(self.folder / STATE, IN_CHECKPOINT)

    def read_model(self, *, averaged: bool = False) -> ModelWeights:
        """Opens the model's parameters and buffers, as one model.

        Args:
            averaged: take the moving averages of its parameters, where there are some.
        """
        from grappe.checkpoint.model_weights import ModelWeights

        return ModelWeights(self.read_tensors(), averaged=averaged)


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Lists the committed checkpoints in `folder`, newest first; not yet verified.

    Raises:
        RunError: the folder is a link.
    """
    checkpoints = []
    try:
        names = files.names(folder, IN_RUN)
    except OSError:
        return []
    for name in names:
        prefix, _, number = name.partition("-")
        if (
            prefix == "step"
            and number.isdecimal()
            and number.isascii()
            and files.kind(folder / name) == "folder"
        ):
            step = int(number)
            if folder / name == step_folder(folder, step):  # a step has one name
                checkpoints.append(Checkpoint(folder=folder / name, step=step))
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step, reverse=True)


def latest(folder: Path, run: str = "") -> Checkpoint | None:
    """Finds the newest checkpoint that verifies, from the checkpoint folders alone: no pointer can be wrong.

    Args:
        run: the id of the run that it should be of; "": any.
    """
    return next(
        (checkpoint for checkpoint in list_checkpoints(folder) if verify(checkpoint.folder, run) is None),
        None,
    )


def step_folder(folder: Path, step: int) -> Path:
    """Returns the folder of the checkpoint of `step`."""
    return folder / step_name(step)
