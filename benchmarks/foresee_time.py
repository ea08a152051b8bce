"""Predicted step time beside measured step time, for docs/foresee.md: `python -m benchmarks.foresee_time`.

Needs a machine without other programs, and `grappe doctor --calibrate` before. With a number of seconds it stops
after them, and goes on when it is called again; `--predict` predicts all cells anew, and measures nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import shipped_data
from grappe import Arrays, Task
from grappe.errors import PlanError
from grappe.fields import split
from grappe.foresight import calibration as kept
from grappe.foresight.sketch import Sketch
from grappe.foresight.step_time import Clock
from grappe.launch.start import start
from grappe.plan import Plan
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference

FILE = Path(__file__).parent / "results" / "foresee_time.json"
SECONDS = 4  # of a cell's steps
TASKS = (
    "digits", "digits batch_size=512", "pysource batch_size=8 megabytes=0.3", "mlp", "mlp batch_size=512", "cnn",
    "coatnet batch_size=8", "mnist", "fashion_mnist", "cifar10", "cifar10 network=resnet18 batch_size=32",
    "imagenet network=resnet18 classes=4 image_size=64 batch_size=32",
)  # fmt: skip
PLANS = (
    "", "threads=1", "replicate=2", "shard=2", "shard=2,zero=2", "shard=2,zero=1", "microbatches=2", "recompute",
    "precision=bf16", "replicate=2,microbatches=2", "shard=2,zero=1,microbatches=2", "pipeline=2,microbatches=4",
    "replicate=2,precision=bf16", "pipeline=2,microbatches=4,schedule=gpipe",
    "pipeline=2,microbatches=4,schedule=interleaved", "pipeline=2,microbatches=4,schedule=zero_bubble",
    "tensor=2", "tensor=2,microbatches=2", "offload=cpu", "offload=cpu,microbatches=2", "shard=2,offload=cpu",
)  # fmt: skip


class Perceptron(Task):
    """Four layers of 1,024, on random rows."""

    batch_size: int = 128
    width: int = 1024

    def model(self) -> nn.Module:
        sizes = [784, self.width, self.width, self.width]
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))

    def data(self, split: str, folder: Path) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(torch.randn(4096, 784, generator=draw), torch.randint(0, 10, (4096,), generator=draw))

    def loss(self, output: Any, target: Any) -> Any:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named_parameters, lr=1e-3)

    def units(self, model: Any) -> list[nn.Module]:
        return list(model)


class Convolutional(Perceptron):
    """Six convolutions with batch normalisation, on random pictures of 32 x 32."""

    batch_size: int = 32
    width: int = 64

    def model(self) -> nn.Module:
        sizes = [3, *[self.width] * 3, *[2 * self.width] * 3]
        blocks = [
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=1 + (a != b and a > 3), padding=1), nn.BatchNorm2d(b), nn.ReLU()
            )
            for a, b in itertools.pairwise(sizes)
        ]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * self.width, 10))
        return nn.Sequential(*blocks, head)

    def data(self, split: str, folder: Path) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randn(1024, 3, 32, 32, generator=draw), torch.randint(0, 10, (1024,), generator=draw)
        )

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named_parameters, lr=0.01, momentum=0.9)


OWN = {"mlp": Perceptron, "cnn": Convolutional}


def reference(task: str) -> TaskReference:
    """Makes a cell's task: a shipped one, or one of this file's."""
    name, *fields = task.split()
    texts = split(fields)
    if name in OWN:
        return TaskReference.of(OWN[name](**{key: int(value) for key, value in texts.items()}))
    return TaskReference.of(name, texts)


def cells() -> Iterator[tuple[str, str]]:
    """Yields each task, with its fields, and each plan."""
    for plan in PLANS:
        for task in TASKS:
            yield task, plan


def measured(task: str, plan: str, expected: float, seconds: float = SECONDS) -> dict[str, Any]:
    """Trains about `seconds` of steps in new processes; returns medians of the process whose steps take longest."""
    steps = 6 + max(8, min(200, int(seconds / expected)))
    with tempfile.TemporaryDirectory() as folder:
        request = Request(
            task=reference(task),
            plan=Plan.parse(plan),
            base=Path(folder),
            run=Path(folder) / "run",
            quiet=True,
            options=Options(steps=steps, steps_only=True),
        )
        start("grappe.training.worker:worker", request, request.plan, run=request.run)
        timings = [one["timing"] for one in Run(request.run or Path()).read_description()["costs"]]
    slowest = max(timings, key=lambda one: one["step"]["median"])
    phases = {name: round(values["median"], 6) for name, values in slowest["phases"].items()}
    return {"step": round(slowest["step"]["median"], 6), **phases}


def main() -> None:
    """Predicts each cell, then measures those that the file has not."""
    shipped_data.use()
    begun, limit = time.monotonic(), float(next((one for one in sys.argv[1:] if one.isdigit()), "1e9"))
    wanted = [one for one in sys.argv[1:] if not one.isdigit() and not one.startswith("--")]
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    calibration = kept.read()
    assert calibration is not None, "run: grappe doctor --calibrate"
    calibration = dataclasses.replace(calibration, operators={})  # run in the same minutes as the trainings
    clocks: dict[str, Clock] = {}
    for task, plan in cells():
        key = f"{task} | {plan}"
        if time.monotonic() - begun > limit or (wanted and not any(one in key for one in wanted)):
            continue
        if key in found and "--predict" not in sys.argv and "--again" not in sys.argv:
            continue
        if task not in clocks:
            sketch = Sketch(reference(task).resolve(), data_folder(), records=True)
            clocks[task] = Clock(sketch, calibration, seconds=1e9)
        clocks[task].calibration = calibration
        with contextlib.suppress(PlanError):
            predicted = clocks[task].of(Plan.parse(plan))
            calibration = clocks[task].calibration
            parts = {
                name: round(getattr(predicted, name), 6)
                for name in ("total", "compute", "communication", "bubble", "data")
            }
            cell = found.setdefault(key, {})
            cell["predicted"] = parts
            if "measured" not in cell or "--again" in sys.argv:
                cell["measured"] = measured(task, plan, predicted.total)
            say(key, cell)
            FILE.write_text(json.dumps(found, indent=1) + "\n")
    errors = sorted(abs(error(cell)) for cell in found.values())
    if errors:
        print(f"{len(errors)} cells: median {statistics.median(errors):.1f} %, worst {errors[-1]:.1f} %")


def error(cell: dict) -> float:
    """Computes how far the prediction is off, in percent; below 0: predicted too short."""
    return 100 * (cell["predicted"]["total"] / cell["measured"]["step"] - 1)


def say(key: str, cell: dict) -> None:
    """Prints a cell."""
    print(
        f"{key:55} {1e3 * cell['measured']['step']:9.2f} ms",
        f"{1e3 * cell['predicted']['total']:9.2f} {error(cell):+6.1f} %",
        {name: round(1e3 * value, 2) for name, value in cell["predicted"].items()},
        {name: round(1e3 * value, 2) for name, value in cell["measured"].items()},
        flush=True,
    )


if __name__ == "__main__":
    main()
