"""Curves: writes metrics.jsonl, one line for each step, each epoch and each evaluation."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, BinaryIO

from grappe.launch import files
from grappe.step.scores import Scores
from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher, as_json

FLUSH_SECONDS = 1.0  # what a killed process loses at most, beside the records that it was not yet given
SKIPPED = ', "skipped": true'


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
        self._write({**line, "loss": as_json(scores.loss), **scores.metrics})

    def saving(self, step: int) -> None:
        self._flush()

    def ended(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._flush()
            self._write({"kind": "data", "step": outcome.step, **outcome.headspace.as_json()})
        self._flush()
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        self._text += "".join(map(self._lines, self._waiting)).encode()
        self._waiting.clear()
        with contextlib.suppress(OSError):  # a full disk: kept until there is room; a failed save reports it
            while self._file is not None and self._text:
                self._text = self._text[self._file.write(self._text) :]

    def _lines(self, record: Record) -> str:
        """Formats a step, and after an epoch's last step the seconds of its steps in this start."""
        self._epoch_seconds += record.seconds
        self._epoch_steps += 1
        if record.step % self._steps_per_epoch:
            return _line(record)
        text = (
            f'{{"kind": "epoch", "step": {record.step}, "epoch": {record.epoch}, "steps": {self._epoch_steps}, '
            f'"seconds": {self._epoch_seconds:.6f}}}\n'
        )
        self._epoch_seconds, self._epoch_steps = 0.0, 0
        return _line(record) + text

    def _write(self, line: dict) -> None:
        self._text += json.dumps(line).encode() + b"\n"


def _line(record: Record) -> str:
    """Formats a step as a line of JSON by hand, since json.dumps takes three times as long."""
    norm = "" if record.norm is None else f', "norm": {_number(record.norm)}'
    return (
        f'{{"kind": "step", "step": {record.step}, "epoch": {record.epoch}, "samples": {record.samples}, '
        f'"loss": {_number(record.loss)}, "lr": {record.lr!r}, "seconds": {record.seconds:.6f}'
        f"{norm}{SKIPPED if record.skipped else ''}{_metrics(record)}}}\n"
    )


def _metrics(record: Record) -> str:
    """Formats the training metrics that --print-every shows; the steps between have none."""
    if not record.metrics:
        return ""
    return ", " + json.dumps({name: _as_json(value) for name, value in record.metrics.items()})[1:-1]


def _as_json(value: float | list[float]) -> Any:
    return [as_json(entry) for entry in value] if isinstance(value, list) else as_json(value)


def _number(value: float) -> str:
    return repr(value) if value - value == 0 else "null"
