"""Finds, chooses, reads and removes checkpoints on disk: tensors in safetensors, all else in JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.checkpoint.commit import MANIFEST, read_json, step_name, strangers, verify
from grappe.errors import RunError, UsageError
from grappe.launch import files
from grappe.words import format_number

if TYPE_CHECKING:
    from grappe.checkpoint.tensor_file import TensorFiles
    from grappe.checkpoint.weights import ModelWeights

STATE = "state.json"
STEP = re.compile(r"step-(\d+)", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint on disk."""

    folder: Path
    step: int
    """Optimizer steps done when the checkpoint was saved."""

    def read_tensors(self) -> TensorFiles:
        """Opens the checkpoint's files and checks their headers; each tensor is read when it is requested."""
        from grappe.checkpoint.tensor_file import TensorFiles

        names = read_json(self.folder / MANIFEST, files.IN_CHECKPOINT).get("files", {})
        return TensorFiles([self.folder / name for name in sorted(names) if name.endswith(".safetensors")])

    def read_values(self) -> dict[str, Any]:
        """Reads the checkpoint's JSON."""
        return read_json(self.folder / STATE, files.IN_CHECKPOINT)

    def read_model(self, *, averaged: bool = False) -> ModelWeights:
        """Opens the model's parameters and buffers, as one model.

        Args:
            averaged: take the moving averages of its parameters, where there are some.
        """
        from grappe.checkpoint.weights import ModelWeights

        return ModelWeights(self.read_tensors(), averaged=averaged)


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Lists the committed checkpoints in `folder`, newest first; not yet verified.

    Raises:
        RunError: the folder is a link.
    """
    steps = list[int]()  # whose folders have one name each
    with contextlib.suppress(OSError):
        steps = [int(match[1]) for match in map(STEP.fullmatch, files.names(folder, files.IN_RUN)) if match]
    checkpoints = (Checkpoint(folder=step_folder(folder, step), step=step) for step in sorted(set(steps), reverse=True))
    return [checkpoint for checkpoint in checkpoints if files.kind(checkpoint.folder) == "folder"]


def latest(folder: Path, run: str = "") -> Checkpoint | None:
    """Finds the newest checkpoint that verifies, from the checkpoint folders alone: no pointer can be wrong.

    Args:
        run: the id of the run that it should be of; "": any.
    """
    return choose(folder, run).checkpoint


def step_folder(folder: Path, step: int) -> Path:
    """Returns the folder of the checkpoint of `step`."""
    return folder / step_name(step)


LAST, BEST = "last", "best"
DAMAGED = re.compile(r"damaged-step-\d{6,}-[0-9a-f]{8}", re.ASCII)  # renamed by a save of the same step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A checkpoint, and the reason why it is taken."""

    checkpoint: Checkpoint | None
    """None: there is none that verifies."""
    why: str = "newest"
    passed_over: tuple[str, ...] = ()
    """Checkpoints that might be newer, and are not taken: a sentence each."""

    @property
    def reason(self) -> str:
        """Returns why the checkpoint is taken: the ones passed over, or `why`."""
        return "; ".join(self.passed_over) or self.why

    def __str__(self) -> str:
        name = self.checkpoint.folder.name if self.checkpoint else ""
        if name and not self.passed_over:
            return f"{name} ({self.why})"
        return "; ".join((*self.passed_over, f"{name} is taken" if name else "no checkpoint verifies"))


def choose(folder: Path, run: str = "", saved: int | None = None) -> Choice:
    """Finds the newest checkpoint in `folder` that verifies, and names the ones passed over.

    Args:
        run: the id of the run that it should be of; "": any.
        saved: the step of the checkpoint that the run's last start recorded as saved.
    """
    newest_whole, passed_over, strange = None, list[str](), list[str]()
    checkpoints = list_checkpoints(folder)
    committed = {checkpoint.folder.name for checkpoint in checkpoints}
    with contextlib.suppress(OSError):
        for name in files.names(folder):  # a renamed or linked one may really be the newest
            if not (name in committed or name.startswith(".") or DAMAGED.fullmatch(name)):
                shown = name if name.isprintable() else repr(name)
                what = "is a link" if files.kind(folder / name) == "link" else "is not a checkpoint's name"
                strange.append(f"{shown} {what}: skipped")
    for checkpoint in checkpoints:
        problem = verify(checkpoint.folder, run)
        if problem is None:
            newest_whole = checkpoint
            break
        passed_over.append(f"{checkpoint.folder.name} does not verify: skipped ({problem})")
    newest = newest_whole.step if newest_whole else -1
    if saved is not None and saved > newest and all(checkpoint.step != saved for checkpoint in checkpoints):
        passed_over.insert(0, f"{step_name(saved)}, which run.json says was saved, is missing")
    return Choice(checkpoint=newest_whole, passed_over=(*strange, *passed_over))


def select(folder: Path, which: int | str | None, *, run: str = "", saved: int | None = None) -> Choice:
    """Finds the checkpoint `which` (a step, "last", "best"), and no other; None: as `choose` does.

    Raises:
        RunError: it is not there or does not verify; or it cannot be known which is the best.
    """
    if which is None:
        return choose(folder, run, saved)
    if which == LAST:
        choice = choose(folder, run, saved)
        if choice.passed_over or choice.checkpoint is None:
            raise RunError(f"the last checkpoint of {folder.parent} cannot be read: {choice}. {_others(folder)}")
        return choice
    if which == BEST:
        checkpoints = list_checkpoints(folder)
        for checkpoint in checkpoints:
            if (problem := verify(checkpoint.folder, run)) is not None:
                raise RunError(
                    f"{checkpoint.folder} does not verify ({problem}), so the best one is unknown. {_others(folder)}"
                )
        best = min(checkpoints, key=validation_loss, default=None)
        if best is None or validation_loss(best) == math.inf:
            raise RunError(f"no checkpoint of {folder.parent} has a validation loss. {_others(folder)}")
        return Choice(checkpoint=best, why=f"best: validation loss {format_number(validation_loss(best))}")
    if not (isinstance(which, int) or (which.isascii() and which.isdecimal() and len(which) < 19)):
        raise RunError(f"--checkpoint={which}: give a step, last or best")
    step = int(which)
    checkpoint = next((candidate for candidate in list_checkpoints(folder) if candidate.step == step), None)
    if checkpoint is None:
        raise RunError(f"{folder.parent} has no checkpoint of step {step}. {_others(folder)}")
    problem = verify(checkpoint.folder, run)
    if problem is not None:
        raise RunError(f"{checkpoint.folder} does not verify: {problem}. {_others(folder)}")
    return Choice(checkpoint=checkpoint, why="as asked")


def validation_loss(checkpoint: Checkpoint) -> float:
    """Reads the validation loss that a checkpoint was saved with; infinite where there is none."""
    try:
        loss = checkpoint.read_values().get("validation_loss")
    except RunError:
        return math.inf
    return float(loss) if isinstance(loss, float) and math.isfinite(loss) else math.inf


def _others(folder: Path) -> str:
    steps = ", ".join(str(checkpoint.step) for checkpoint in list_checkpoints(folder))
    return f"There is: --checkpoint {steps}" if steps else "There is none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """Number of newest checkpoints to keep in addition to the one with the lowest validation loss."""

    last: int = 3

    def clean(self, folder: Path, committed: int) -> list[Path]:
        """Removes old checkpoints, once the checkpoint of step `committed` is on disk; returns the removed folders.

        Checkpoints of later steps did not verify when the training resumed from an earlier step: they are not counted,
        so that they cannot displace intact ones.
        """
        removed = []
        candidates = [checkpoint for checkpoint in list_checkpoints(folder) if checkpoint.step <= committed]
        for checkpoint in superfluous(candidates, self.last):
            with contextlib.suppress(OSError, RunError):  # tried again at the next commit
                if remove(checkpoint.folder):
                    removed.append(checkpoint.folder)
        return removed


def remove(checkpoint: Path) -> bool:
    """Removes a checkpoint's folder; returns False, and leaves it alone, if it holds files that no save put there."""
    if strangers(checkpoint):
        return False
    # Renamed first, so that a kill in between leaves nothing that looks like a checkpoint.
    doomed = checkpoint.with_name(f".old-{checkpoint.name}.{secrets.token_hex(8)}")
    files.rename(checkpoint, doomed, files.IN_PART)
    files.remove_tree(doomed, files.IN_PART)
    return True


def superfluous(checkpoints: list[Checkpoint], last: int) -> list[Checkpoint]:
    """Returns the `checkpoints` (newest first) that are neither among the `last` newest nor the best."""
    best = min(checkpoints, key=validation_loss, default=None)
    return [old for old in checkpoints[last:] if old is not best or validation_loss(old) == math.inf]


LEFT = re.compile(r"\.(step-\d{6,}|old-step-\d{6,})\.\w+", re.ASCII)


def leftovers(folder: Path, older_than_seconds: float = 0.0) -> list[Path]:
    """Lists the folders that interrupted saves left on disk: folders that hold nothing but files of a save.

    Raises:
        RunError: `folder` is a link.
    """
    now = time.time()
    left = []
    with contextlib.suppress(OSError):  # no such folder, or somebody else removes them just now
        for name in files.names(folder):
            entry = folder / name
            ours = LEFT.fullmatch(name) and files.kind(entry) == "folder" and not strangers(entry)
            if ours and now - entry.lstat().st_mtime >= older_than_seconds:
                left.append(entry)
    return left


PACKAGE = ".pt2"


def refuse_package(file: Path) -> None:
    """Raises UsageError where `file` is named as a package of torch.export or AOTInductor."""
    if file.suffix.lower() == PACKAGE:
        raise UsageError(
            f"{file}: grappe opens no {PACKAGE} file. It is native code (or a pickle), and opening it runs the code "
            "in it. Give the run that it was exported from, or weights alone: grappe export RUN --out FOLDER "
            "--format safetensors"
        )
