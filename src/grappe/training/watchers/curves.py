"""Curves: writes metrics.jsonl, one line for each step, epoch and evaluation; the noise scale; the samples' ids."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from grappe.data.batch import Batch
from grappe.data.loader import BatchLoader
from grappe.data.sampling import SampleOrder
from grappe.launch import files
from grappe.launch.files import IN_PART, IN_RUN
from grappe.launch.terminal import UserStream, say
from grappe.step.noise_scale import Noise, NoiseScale
from grappe.step.scores import Scores
from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher

FLUSH_SECONDS = 1.0  # what a killed process loses at most beyond records that were not passed to it yet


JSON = msgspec.json.Encoder(enc_hook=float)
"""Encoder of records: a number that is not finite becomes null."""


class Curves(Watcher):
    """Watcher that writes lines in blocks, so that a step costs a few microseconds; all lines before each save."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._text = b""
        self._waiting: list[Record] = []
        self._flushed = 0.0
        self._steps_per_epoch = 1
        self._epoch_seconds, self._epoch_steps = 0.0, 0

    def started(self, info: RunInfo) -> None:
        self._file = files.appender(info.folder / "metrics.jsonl")
        self._steps_per_epoch = info.steps_per_epoch

    def stepped(self, record: Record) -> None:
        self._waiting.append(record)
        now = time.monotonic()
        if now - self._flushed > FLUSH_SECONDS:
            self._flushed = now
            self._flush()

    def evaluated(self, step: int, scores: Scores) -> None:
        self._flush()
        line = {"kind": "evaluation", "step": step, "samples": scores.samples, "count": scores.count}
        if scores.split != "validation":
            line["split"] = scores.split
        self._text += _line({**line, "loss": scores.loss, **scores.metrics})

    def saving(self, step: int) -> None:
        self._flush()

    def ended(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._flush()
            self._text += _line({"kind": "data", "step": outcome.step, **outcome.headspace.as_json()})
        self._flush()
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        self._text += b"".join(map(self._lines, self._waiting))
        self._waiting.clear()
        with contextlib.suppress(OSError):  # a full disk: kept until there is room; a failed save reports it
            while self._file is not None and self._text:
                self._text = self._text[self._file.write(self._text) :]

    def _lines(self, record: Record) -> bytes:
        """Formats a step, and after an epoch's last step the seconds of its steps in this start."""
        line = {
            "kind": "step",
            "step": record.step,
            "epoch": record.epoch,
            "samples": record.samples,
            "loss": record.loss,
            "lr": record.lr,
            "seconds": round(record.seconds, 6),
            "data": round(record.data, 6),
            **record.metrics,
        }
        if record.device is not None:
            line["device"] = round(record.device, 6)
        if record.norm is not None:
            line["norm"] = record.norm
        if record.skipped:
            line["skipped"] = True
        self._epoch_seconds += record.seconds
        self._epoch_steps += 1
        if record.step % self._steps_per_epoch:
            return _line(line)
        epoch = {"kind": "epoch", "step": record.step, "epoch": record.epoch, "steps": self._epoch_steps}
        seconds, self._epoch_seconds, self._epoch_steps = round(self._epoch_seconds, 6), 0.0, 0
        return _line(line) + _line({**epoch, "seconds": seconds})


def _line(record: Mapping[str, Any]) -> bytes:
    return JSON.encode(record) + b"\n"


FAR = 4.0
"""A batch that is so many times smaller than the noise scale is far below it."""


class NoiseWatcher(Watcher):
    """Watcher on process 0, which has measured.

    Args:
        stream: for the sentence at the end; None: nothing is printed.
    """

    def __init__(self, meter: NoiseScale, stream: UserStream | None) -> None:
        self._meter, self._stream = meter, stream
        self._file: BinaryIO | None = None
        self._batch_size = 0
        self._last: Noise | None = None
        self._first: float | None = None

    def started(self, info: RunInfo) -> None:
        self._file, self._batch_size = files.appender(info.folder / "metrics.jsonl"), info.batch_size

    def evaluated(self, step: int, scores: Scores) -> None:
        noise = self._meter.take()
        if noise is None:
            return
        self._last = noise
        if self._first is None:
            self._first = noise.scale
        with contextlib.suppress(OSError):  # a full disk is reported by the next checkpoint
            assert self._file is not None, "a watcher is started first"
            line = {"kind": "noise", "step": step, "steps": noise.steps, "noise_scale": noise.scale}
            self._file.write(_line({**line, "variance": noise.variance, "gradient_square": noise.square}))

    def ended(self, outcome: Outcome | None) -> None:
        if self._file is not None:
            self._file.close()
        if outcome is not None and self._stream is not None and self._last is not None:
            say(sentence(self._last, self._batch_size, self._first), self._stream)


def sentence(noise: Noise, batch_size: int, first: float | None = None) -> str:
    """Formats what the noise scale says about larger batches."""
    scale = noise.scale
    if scale is None:
        return "gradient noise scale: cannot be distinguished from chance yet: take more steps, or more microbatches"
    about, first_about = rounded(scale), None if first is None else rounded(first)
    began = f" ({first_about} at first)" if first_about not in (None, about) else ""
    text = f"gradient noise scale: about {about} samples{began}; a batch has {batch_size:,}. "
    if batch_size * FAR <= scale:
        return text + f"A larger batch learns almost as much from each sample, up to about {about}"
    if batch_size <= scale:
        return text + f"Beyond about {about} samples a step more devices bring speed, not progress"
    small = "More samples a step bring hardly any progress: a smaller batch learns as much in as many steps"
    return text + small


def rounded(value: float) -> str:
    """A number of samples with two digits."""
    return f"{int(float(f'{value:.2g}')):,}" if value >= 1 else "1"


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

    def batches(self, kind: str, loader: BatchLoader, start: int, stop: int) -> Iterator[Batch]:
        """Yields a loader's batches of steps `start` to `stop`, and logs each when it is taken."""
        for batch in loader.batches(start, stop):
            self.add(kind, batch, loader.order)
            yield batch

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


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"
