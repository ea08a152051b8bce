"""Sample ledger: writes which samples each step and each evaluation of this process really took."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from grappe.data.batch import Batch

WAITING_BYTES = 1 << 16


class SampleLedger:
    """Taken from the batches themselves, so that a reader can check the ledger's promises from outside."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._rank = folder, rank
        self._file = _path(folder, rank).open("ab", buffering=0)
        self._waiting = bytearray()

    def cut_back(self, step: int, processes: int) -> None:
        """Drops what lies beyond `step`: the training goes on from there, perhaps with fewer processes."""
        self._file.close()
        mine = range(self._rank, self._rank + 1)
        if self._rank == 0:
            known = [int(file.stem.partition("-")[2]) for file in self._folder.glob("rank-*.jsonl")]
            mine = [0, *(rank for rank in known if rank >= processes)]  # those that nobody is any more
        for rank in mine:
            _cut_back(_path(self._folder, rank), step)
        self._file = _path(self._folder, self._rank).open("ab", buffering=0)

    def noted(self, batches: Iterator[Batch], kind: str, step: int | None = None) -> Iterator[Batch]:
        """The same batches, each written down: {"kind", "step", "ids"}."""
        for batch in batches:
            at = batch.step + 1 if step is None else step
            self._waiting += (
                json.dumps({"kind": kind, "step": at, "ids": batch.ids.tolist()}).encode() + b"\n"
            )
            if len(self._waiting) >= WAITING_BYTES:
                self.flush()
            yield batch

    def flush(self) -> None:
        """Everything so far is in the file; on a full disk it is kept until there is room."""
        with contextlib.suppress(OSError):
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def _cut_back(file: Path, step: int) -> None:
    kept = []
    for line in file.read_text().splitlines(keepends=True):
        # A process that was killed has left half a line, the last, of a step behind the checkpoint.
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    beside = file.with_name(f".{file.name}")
    beside.write_text("".join(kept))
    beside.replace(file)
