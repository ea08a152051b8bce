"""SampleLog: writes the ids of the samples of each step and each evaluation of this process."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from grappe.data.batch import Batch
from grappe.data.loader import BatchLoader
from grappe.data.sampling import SampleOrder
from grappe.launch import files
from grappe.launch.files import IN_PART, IN_RUN
from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher

FOLDER = "samples"
BUFFER_BYTES = 1 << 16
NAME = re.compile(r"rank-(\d+)\.jsonl", re.ASCII)


class SampleLog(Watcher):
    """Log of the batches' own sample ids, with which the sample order can be checked independently.

    Every process has a SampleLog with a separate file. A line is {"kind": "step" or "evaluation", "step", "ids"}.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._buffer = bytearray()
        self._step = 0  # the last delivered step: before an evaluation, all steps are delivered

    def started(self, info: RunInfo) -> None:
        """Drops lines after the resumed checkpoint, whose steps the training repeats, perhaps on fewer processes."""
        folder = info.folder / FOLDER
        files.make_folder(folder, IN_RUN)
        self._step = info.start
        ranks = {info.rank}
        if info.rank == 0:
            logged = {int(match[1]) for name in files.names(folder, IN_RUN) if (match := NAME.fullmatch(name))}
            ranks |= {rank for rank in logged if rank >= info.world_size}  # processes that are gone
        for rank in ranks:
            file = _path(folder, rank)
            try:
                lines = files.read_bytes(file, IN_PART).splitlines(keepends=True)
            except FileNotFoundError:
                continue
            # A killed process leaves an incomplete last line, of a step after the checkpoint.
            kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= info.start]
            files.replace(file, b"".join(kept), IN_PART)
        self._file = files.appender(_path(folder, info.rank), IN_PART)

    def stepped(self, record: Record) -> None:
        self._step = record.step

    def saving(self, step: int) -> None:
        self._flush()

    def ended(self, outcome: Outcome | None) -> None:
        self._flush()
        if self._file is not None:
            self._file.close()

    def add(self, kind: str, batch: Batch, order: SampleOrder | None = None) -> None:
        """Logs a batch of a step, or of the evaluation after the last step."""
        step = batch.step + 1 if kind == "step" else self._step
        ids = batch.ids if order is None else order.samples(batch.ids)
        line = {"kind": kind, "step": step, "ids": ids.tolist()}
        self._buffer += json.dumps(line).encode() + b"\n"
        if len(self._buffer) >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: kept until there is room
            while self._buffer and self._file is not None:
                del self._buffer[: self._file.write(self._buffer)]


class LoggedLoader:
    """A BatchLoader whose batches are written to a SampleLog, each when it is taken."""

    def __init__(self, log: SampleLog, loader: BatchLoader, kind: str) -> None:
        self._log, self._loader, self._kind = log, loader, kind

    @property
    def order(self) -> SampleOrder:
        """Returns the loader's sample order."""
        return self._loader.order

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yields the batches of steps `start` to `stop`."""
        for batch in self._loader.batches(start, stop):
            self._log.add(self._kind, batch, self._loader.order)
            yield batch

    def rehearsed(self) -> Iterator[Batch]:
        """The loader's, which are not written down."""
        return self._loader.rehearsed()


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"
