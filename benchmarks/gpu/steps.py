"""Overhead of grappe per step on a GPU: waiting for the device, and the chronometer against CUDA events."""

from __future__ import annotations

import statistics
import warnings

import torch

from benchmarks.gpu.part import Part
from benchmarks.gpu.tasks import Small
from benchmarks.gpu.training import plan_on, read_usage, train
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.task_reference import TaskReference
from grappe.training.worker import worker

STEPS = 40


def main(part: Part) -> None:
    """Counts synchronising calls of a training's steps, then compares the chronometer's sum with the wall's."""
    _count_synchronising_calls(part)
    _phases_against_the_wall(part)


def _count_synchronising_calls(part: Part) -> None:
    if not part.on_gpu:
        part.not_tried("calls that wait for the device", "torch counts them on CUDA only")
        return
    request = Request(
        task=TaskReference.of(Small(epochs=1000)),
        plan=Plan.parse(plan_on(part, "")),
        run=part.scratch / "waits",
        options=Options(steps_only=True, steps=STEPS),
    )
    process = ProcessRank(rank=0, size=1, local_rank=0, local_size=1, launcher="torchrun")
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        worker(request, process, part.scratch)
    torch.cuda.set_sync_debug_mode("default")
    lines: dict[str, int] = {}
    for one in seen:
        if "synchron" in str(one.message):
            line = f"{one.filename.rpartition('/')[2]}:{one.lineno}"
            lines[line] = lines.get(line, 0) + 1
    often = {line: count for line, count in lines.items() if count >= STEPS // 2}
    text = ", ".join(f"{line} {count} times" for line, count in sorted(lines.items(), key=lambda item: -item[1])[:8])
    part.check(f"no call that waits for the device in each of {STEPS} steps", not often, text or "none at all")


def _phases_against_the_wall(part: Part) -> None:
    """The phases of all steps add up to what the steps took."""
    run = train(part, Small(epochs=1000), "", "phases", steps=STEPS, steps_only=True)
    used = read_usage(run.folder)
    phases = sum(seconds for usage in used for seconds in usage["phases"].values())
    share = phases / sum(usage["seconds"] for usage in used)
    steps = statistics.median(record["seconds"] for record in run.records("step"))
    part.check(
        "the chronometer's phases add up to the training's time",
        0.9 <= share <= 1.1,
        f"{share:.3f} of it; a step takes {steps * 1e3:.2f} ms",
        share=share,
    )
