"""Noise: writes the gradient noise scale into the curves at each evaluation, and says at the end what it means."""

from __future__ import annotations

import contextlib
import json
from typing import Any, BinaryIO

from grappe.launch import files
from grappe.launch.terminal import UserStream, say
from grappe.step.noise_scale import Noise, NoiseScale
from grappe.step.scores import Scores
from grappe.training.watchers.base import Outcome, RunInfo, Watcher

FAR = 4.0
"""A batch that is so many times smaller than the noise scale is far below it."""


class NoiseWatcher(Watcher):
    """Watcher on process 0, which has measured.

    Args:
        stream: for the sentence at the end; None: nothing is said.
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
        self._write(step)

    def ended(self, outcome: Outcome | None) -> None:
        if self._file is not None:
            self._file.close()
        if outcome is not None and self._stream is not None and self._last is not None:
            say(sentence(self._last, self._batch_size, self._first), self._stream)

    def _write(self, step: int) -> None:
        noise = self._meter.take()
        if noise is None:
            return
        self._last = noise
        if self._first is None:
            self._first = noise.scale
        with contextlib.suppress(OSError):  # a full disk is reported by the next checkpoint
            assert self._file is not None, "a watcher is started first"
            self._file.write(json.dumps(record(noise, step)).encode() + b"\n")


def record(noise: Noise, step: int) -> dict[str, Any]:
    """The line of the curves."""
    return {
        "kind": "noise",
        "step": step,
        "steps": noise.steps,
        "noise_scale": noise.scale,
        "variance": noise.variance,
        "gradient_square": noise.square,
    }


def sentence(noise: Noise, batch_size: int, first: float | None = None) -> str:
    """Formats what the noise scale says about larger batches."""
    scale = noise.scale
    if scale is None:
        return "gradient noise scale: not to be told from chance so far: it takes more steps, or more microbatches"
    about, first_about = rounded(scale), None if first is None else rounded(first)
    began = f" ({first_about} at first)" if first_about not in (None, about) else ""
    text = f"gradient noise scale: about {about} samples{began}; a batch has {batch_size:,}. "
    if batch_size * FAR <= scale:
        return text + f"A larger batch learns almost as much from each sample, up to about {about}"
    if batch_size <= scale:
        return text + f"Beyond about {about} samples a step more devices bring speed, not progress"
    return (
        text
        + "More samples a step bring hardly any progress: a smaller batch learns as much in as many steps"
    )


def rounded(value: float) -> str:
    """A number of samples with two digits."""
    return f"{int(float(f'{value:.2g}')):,}" if value >= 1 else "1"
