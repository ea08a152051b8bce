"""Memory and time of plans for a model that is too big: peak memory of the largest process, seconds per step.

    python -m benchmarks.too_big [PLAN ...]        # in a plan, {disk} is a folder that it makes

A byte-level GPT of 25 million parameters (102 MB; 408 MB with gradients and Adam's state), 8 samples of 128 bytes
a step, one thread a process.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Literal

import torch

import grappe
from benchmarks.figures import table
from grappe import Arrays
from grappe.tasks.pysource import PySource
from grappe.training.options import Options
from grappe.training.run import Run

PLANS = [
    "",
    "microbatches=4",
    "recompute",
    "replicate=2",
    "shard=2,zero=1",
    "shard=2,zero=2",
    "shard=2",
    "shard=2,recompute",
    "pipeline=2,microbatches=4",
    "pipeline=2,schedule=gpipe,microbatches=4",
    "pipeline=2,schedule=zero_bubble,microbatches=4",
    "pipeline=2,microbatches=4,recompute",
    "engine=deepspeed,shard=2,zero=1",
    "engine=deepspeed,shard=2,zero=2",
    "engine=deepspeed,shard=2",
    "engine=deepspeed,shard=2,offload=cpu",
    "engine=deepspeed,shard=2,offload=nvme:{disk}",
    "engine=deepspeed,offload=nvme:{disk}",
]
STEPS = 3


class Short(PySource):
    """The shipped GPT on 24 samples."""

    batch_size: int = 8
    size: Literal["tiny", "mini", "small", "medium", "large", "xl"] = "mini"
    megabytes: float = 0.3

    def data(self, split: str, folder: Path) -> Arrays:
        whole = super().data(split, folder)
        return Arrays(whole.inputs[: 8 * STEPS], whole.targets[: 8 * STEPS], transform=torch.Tensor.long)


def row(plan: str, folder: Path) -> tuple[str, ...]:
    """A line of the table; the first step, in which things are made, is left out of the time."""
    disk = folder.with_name(f"{folder.name}-disk")
    disk.mkdir()
    text = f"{plan.format(disk=disk)},device=cpu,threads=1".lstrip(",")
    run: Run = grappe.train(Short(), text, folder, options=Options(steps=STEPS))
    most = max(run.read_description()["costs"], key=lambda one: one["peak"]["host"])
    peak, held = most["peak"]["host"], most["held"]
    told = (peak, held["parameters"], held["gradients"], held["optimizer"], peak - sum(held.values()))
    seconds = sorted(one["seconds"] for one in run.records() if one["kind"] == "step")[: STEPS - 1]
    return (
        plan.format(disk="FOLDER") or "none",
        *(f"{one / 1e6:.0f}" for one in told),
        f"{sum(seconds) / len(seconds):.2f}",
    )


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as base:
        for number, plan in enumerate(sys.argv[1:] or PLANS):
            rows.append(row(plan, Path(base, str(number))))
    print(table(("plan", "peak MB", "parameters", "gradients", "optimizer", "rest", "s a step"), rows))


if __name__ == "__main__":
    main()
