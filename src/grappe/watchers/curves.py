"""Curves: metrics.jsonl, one line a step and one an evaluation."""

from __future__ import annotations

import json
import time
from typing import IO, TYPE_CHECKING

from grappe.scores import Scores
from grappe.watchers.base import Record, Watcher, as_json

if TYPE_CHECKING:
    from grappe.training import Training

FLUSH_SECONDS = 1.0


class Curves(Watcher):
    """Writes lines in blocks, so that a step costs a few microseconds; whole before each save."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._waiting: list[Record] = []
        self._flushed = 0.0

    def started(self, training: Training) -> None:
        self._file = (training.run.folder / "metrics.jsonl").open("a")

    def stepped(self, record: Record) -> None:
        self._waiting.append(record)
        if len(self._waiting) >= 256 or record.seconds > 0.005:
            now = time.monotonic()
            if now - self._flushed > FLUSH_SECONDS:
                self._flushed = now
                self._flush()

    def evaluated(self, step: int, scores: Scores) -> None:
        self._flush()
        line = {"kind": "evaluation", "step": step, "samples": scores.samples, "count": scores.count}
        self._write({**line, "loss": as_json(scores.loss), **scores.metrics})

    def saved(self, step: int) -> None:
        self._flush()

    def ended(self, outcome: object) -> None:
        self._flush()
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        for record in self._waiting:
            line = {
                "kind": "step",
                "step": record.step,
                "epoch": record.epoch,
                "samples": record.samples,
                "loss": as_json(record.loss),
                "lr": record.lr,
                "seconds": round(record.seconds, 6),
            }
            if record.norm is not None:
                line["norm"] = as_json(record.norm)
            if record.skipped:
                line["skipped"] = True
            self._write(line)
        self._waiting.clear()
        if self._file is not None:
            self._file.flush()

    def _write(self, line: dict) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
