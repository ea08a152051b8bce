"""Reads and writes a run's folder: the description, the curves, the checkpoints."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grappe.checkpoint import format as checkpoint_format
from grappe.checkpoint.commit import LARGEST_LIST, flush, json_hash, read_json, write_json
from grappe.errors import RunError
from grappe.launch.folders import RUNS

DESCRIPTION = "run.json"
HASH = "xxh3_128"  # of the other entries of run.json
METRICS = "metrics.jsonl"
LONGEST_LINE = 1 << 20  # characters; a longer one is damage, and is read in parts
DONE = "done"


class Run:
    """The folder of a run.

    Raises:
        RunError: the folder is no run.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not (self.folder / DESCRIPTION).is_file():
            raise RunError(f"{self.folder} is no run: it has no {DESCRIPTION}{_neighbours(self.folder)}")

    def read_description(self) -> dict[str, Any]:
        """Reads run.json: task, fields, plan, versions, hosts, restarts.

        Raises:
            RunError: run.json is damaged.
        """
        found = read_json(self.folder / DESCRIPTION, LARGEST_LIST)
        if found.pop(HASH, None) not in {None, json_hash(found)}:
            raise RunError(
                f"{self.folder / DESCRIPTION} is damaged. The checkpoints beside it are whole: start a new run "
                f"from their weights with --from {self.folder}"
            )
        return found

    def is_finished(self) -> bool:
        """Reads from run.json whether the run's training is finished."""
        return (self.folder / DONE).exists()

    @property
    def checkpoints(self) -> Path:
        """Returns the folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    def latest(self) -> checkpoint_format.Checkpoint | None:
        """Finds the run's newest checkpoint that verifies."""
        return checkpoint_format.latest(self.checkpoints)

    def unverified(self, found: checkpoint_format.Checkpoint) -> list[checkpoint_format.Checkpoint]:
        """Lists the checkpoints newer than `found`, the newest that verifies."""
        return [one for one in checkpoint_format.list_checkpoints(self.checkpoints) if one.step > found.step]

    def records(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields the records of the run's curves, of one `kind` ("step", "evaluation") or all; skips a damaged line."""
        if not (self.folder / METRICS).is_file():  # a pipe would be waited for
            return
        try:
            stream = (self.folder / METRICS).open(errors="replace")
        except OSError:
            return
        with stream:
            for line in iter(lambda: stream.readline(LONGEST_LINE), ""):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict) and kind in (None, record.get("kind")):
                    yield record

    def cut_back(self, step: int) -> None:
        """Drops the records of the curves after `step`, at which the training resumes."""
        kept = []
        for record in self.records():
            at = record.get("step", 0)
            if isinstance(at, int) and at <= step:
                kept.append(json.dumps(record))
        beside = self.folder / f".{METRICS}.{os.getpid()}"
        beside.write_text("".join(line + "\n" for line in kept))
        beside.replace(self.folder / METRICS)

    def describe(self, **changes: Any) -> None:
        """Changes entries of run.json."""
        _write_description(self.folder, {**self.read_description(), **changes})

    def finish(self) -> None:
        """Marks the training as finished."""
        (self.folder / DONE).touch()

    @staticmethod
    def is_run(folder: Path) -> bool:
        """Returns whether there is a run in `folder`."""
        return (folder / DESCRIPTION).is_file()

    @classmethod
    def create(cls, folder: Path, description: dict[str, Any]) -> Run:
        """Makes a new run in `folder`, which may exist if it is empty.

        Raises:
            RunError: the folder has other content, or cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            strangers = [
                entry.name for entry in folder.iterdir() if not entry.name.startswith(("rendezvous-", "logs"))
            ]
            if strangers:
                raise RunError(
                    f"{folder} holds {strangers[0]} and is no run: give an empty folder, or a new one"
                )
            for name in ("checkpoints", "logs"):
                (folder / name).mkdir(exist_ok=True)
            _write_description(folder, description)
            flush(folder.parent)
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written: {error.strerror}: give another with --run"
            ) from error
        return cls(folder)


def _write_description(folder: Path, description: dict[str, Any]) -> None:
    write_json(folder / DESCRIPTION, {**description, HASH: json_hash(description)})


def new_folder(base: Path, task: str) -> Path:
    """Chooses a name for a new run under `base`: the task's, the time, and four digits against a race."""
    place, _, name = task.partition(":")
    name = name.lower() or Path(place).name.removesuffix(".py")
    return base / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def all_runs(base: Path) -> list[Run]:
    """Lists the runs under `base`, oldest first."""
    if not base.is_dir():
        return []
    return [Run(entry) for entry in sorted(base.iterdir()) if (entry / DESCRIPTION).is_file()]


def _neighbours(folder: Path) -> str:
    for base in (folder.parent, RUNS):
        runs = [str(run.folder) for run in all_runs(base)][-3:]
        if runs:
            return f"; there is: {', '.join(runs)}"
    return ""
