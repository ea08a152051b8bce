"""The chronometer against CUDA events around whole steps, and against the durations of all kernels."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu.pace import train_here
from benchmarks.gpu.part import Part
from benchmarks.gpu.tasks import Tokens
from grappe.profiling.chronometer import SAMPLE
from grappe.profiling.phases import WARMUP
from grappe.training.options import Options
from grappe.training.run import Run

BEFORE, PROFILED = 16, 10
ALLOWED = 0.05
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of the profiler's events that keep a GPU busy; ranges that a program names are in none of them."""


def main(part: Part) -> None:
    """Trains a GPT whose steps keep the device busy: once with events around each step, once under the profiler."""
    if part.on_gpu:
        task, steps = Tokens(width=768, depth=4, batch_size=8, samples=1024), 128
    else:
        task = Tokens(width=64, depth=2, heads=2, vocabulary=512, context=64, batch_size=4, samples=256)
        steps = 64
    step = _against_events(part, task, steps)
    _against_kernels(part, task, step)


class Marks:
    """A time stamp behind each step: an event on the GPU's stream, or the CPU's clock."""

    def __init__(self, part: Part) -> None:
        self._part, self._marks = part, list[Any]()

    def tick(self) -> None:
        """Marks the end of a step, without waiting for it."""
        if not self._part.on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Returns the seconds between neighbouring marks."""
        self._part.wait()
        pairs = itertools.pairwise(self._marks)
        if self._part.on_gpu:
            return [began.elapsed_time(ended) / 1e3 for began, ended in pairs]
        return [ended - began for began, ended in pairs]


def _against_events(part: Part, task: Tokens, steps: int) -> float:
    """Compares the median step of the chronometer's own clock with that of the marks; returns the latter."""
    marks = Marks(part)
    folder = train_here(part, task, "precision=bf16", "events", Options(steps_only=True, steps=steps), marks.tick)
    timing = Run(folder).read_description()["costs"][0]["timing"]
    # The steps that the chronometer times: behind the warm-up, and on a GPU one in so many.
    every = SAMPLE if part.on_gpu else 1
    timed = [taken for done, taken in enumerate(marks.seconds(), 1) if done >= WARMUP and done % every == 0]
    step, found = statistics.median(timed), timing["step"]["median"]
    clock = "CUDA events" if part.on_gpu else "the clock around each step"
    part.check(
        f"the chronometer's step against {clock}",
        timing["clock"] == ("device" if part.on_gpu else "host") and abs(found / step - 1) <= ALLOWED,
        f"{found * 1e3:.3f} ms by its {timing['clock']}'s clock, {step * 1e3:.3f} ms by {clock}; {ALLOWED:.0%} allowed",
        chronometer_seconds=found,
        step_seconds=step,
    )
    if not part.on_gpu:
        part.not_tried("the chronometer's step against CUDA events", "there is no GPU here")
    return step


class Profile:
    """Profiles some steps in the middle of a training."""

    def __init__(self, part: Part) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if part.on_gpu else [])]
        self._part, self._profiler = part, torch.profiler.profile(activities=kinds)
        self._done, self._began = 0, 0.0
        self.seconds = 0.0
        """Of the steps under the profiler, with the device waited for at both ends."""

    def tick(self) -> None:
        """Counts a step; begins and ends the profile."""
        self._done += 1
        if self._done == BEFORE:
            self._part.wait()
            self._profiler.start()
            self._began = time.perf_counter()
        elif self._done == BEFORE + PROFILED:
            self._part.wait()
            self.seconds = time.perf_counter() - self._began
            self._profiler.stop()

    def durations(self) -> tuple[float, float]:
        """Returns the seconds in which something ran on the device, and the sum of all durations there."""
        file = self._part.scratch / "trace.json"
        self._profiler.export_chrome_trace(str(file))
        return busy(file, ON_DEVICE if self._part.on_gpu else {"cpu_op"})


def busy(file: Path, categories: set[str]) -> tuple[float, float]:
    """Returns the seconds of a trace's events of these categories: of their union, and of their sum."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in json.loads(file.read_text())["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in categories
    )
    union, reached = 0.0, float("-inf")
    for began, ended in spans:
        union += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return union / 1e6, sum(ended - began for began, ended in spans) / 1e6


def _against_kernels(part: Part, task: Tokens, step: float) -> None:
    """Compares the kernels' durations a step with the step: kernels cannot be busy for longer than it takes."""
    profile = Profile(part)
    steps = BEFORE + PROFILED + 1
    train_here(part, task, "precision=bf16", "kernels", Options(steps_only=True, steps=steps), profile.tick)
    union, total = (seconds / PROFILED for seconds in profile.durations())
    wall = profile.seconds / PROFILED
    # The profiler makes a GPU's host slower, and on a CPU all that is timed.
    least, of = (step, "of a step without the profiler") if part.on_gpu else (wall, "of a step")
    what = "kernels and copies" if part.on_gpu else "operators"
    part.check(
        f"the durations of all {what} against the step",
        0 < union <= wall and union <= (1 + ALLOWED) * least,
        f"{union * 1e3:.3f} ms a step, {union / least:.1%} {of}; their sum is "
        f"{total * 1e3:.3f} ms, a step under the profiler takes {wall * 1e3:.3f} ms",
        busy_seconds=union,
        sum_seconds=total,
        share_of_step=union / least,
    )
    if not part.on_gpu:
        part.not_tried("the durations of all kernels and copies against the step", "there is no GPU here")
