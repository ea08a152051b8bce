"""Compares the headspace that a run names with what removing the cost of data brings: `python -m benchmarks.headspace`.

One training in which loading a sample costs time in every second block of eight steps: sleeping, as a disk lets one
wait, or computing, as a decoder does. What removing the cost brings is the difference between neighbouring blocks, so
that what else the machine does is in both. The network waits for a fixed time, as for a device of its own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

import grappe
from benchmarks.figures import machine, table

SIDE, CLASSES, BATCH = 32, 10, 32
BLOCK = 8
STEP_SECONDS = 0.1


class Case(NamedTuple):
    """Cost of a sample, and the way in which it is loaded."""

    kind: str
    """"sleeps", or "computes", in Python."""
    milliseconds: float
    plan: str


CASES = (
    Case("sleeps", 1.0, "workers=0,threads=1"),
    Case("sleeps", 3.0, "workers=0,threads=1"),
    Case("sleeps", 10.0, "workers=2,loading=threads,threads=1"),
    Case("computes", 1.0, "workers=0,threads=1"),
)
switches: list[mmap.mmap] = []
"""Whether loading costs nothing now; in the training's process alone, in memory that its data workers share."""


class Costly(Dataset):
    """Random images, each of which costs `milliseconds`."""

    keyed = True

    def __init__(self, samples: int, milliseconds: float, kind: str) -> None:
        self._image = torch.zeros(3, SIDE, SIDE)
        self._samples, self._seconds, self._kind = samples, milliseconds / 1e3, kind
        self._free = mmap.mmap(-1, 1)
        switches.append(self._free)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.sample(index, 0)

    def sample(self, index: int, key: int) -> tuple[torch.Tensor, int]:
        """Returns an image after a while."""
        if self._free[0]:
            return self._image, index % CLASSES
        stop = time.thread_time() + self._seconds
        if self._kind == "sleeps":
            time.sleep(self._seconds)
        while self._kind == "computes" and time.thread_time() < stop:
            pass
        return self._image, index % CLASSES


class Pause(nn.Module):
    """Layer that takes a fixed time."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns what it gets."""
        time.sleep(STEP_SECONDS)
        return inputs


class Waiting(grappe.Task):
    """A small network whose samples cost `milliseconds` each."""

    epochs: int = 1
    batch_size: int = BATCH
    pairs: int = 15
    milliseconds: float = 1.0
    kind: str = "sleeps"

    def model(self) -> nn.Module:
        first = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten())
        return nn.Sequential(first, nn.Linear(48, CLASSES), Pause())

    def data(self, split: str, folder: Path) -> Dataset:
        if split == "train":
            return Costly(BATCH * BLOCK * 2 * self.pairs, self.milliseconds, self.kind)
        return grappe.Arrays(torch.zeros(1, 3, SIDE, SIDE), torch.zeros(1, dtype=torch.long))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.01)


class Switch(grappe.Watcher):
    """Lets samples cost time, or not, from each evaluation on."""

    def evaluated(self, step: int, scores: object) -> None:
        """Changes it."""
        switches[-1][0] = not switches[-1][0]


def compared(case: Case, place: Path, pairs: int) -> dict[str, float]:
    """Returns the shares of a training's time that it names, and that removing the cost of its data brings."""
    run = grappe.train(
        Waiting(kind=case.kind, milliseconds=case.milliseconds, pairs=pairs),
        f"{case.plan},device=cpu",
        place,
        options=grappe.Options(evaluate_every=BLOCK),
        watchers=[Switch()],
    )
    description = run.read_description()
    totals = description["costs"][0]["timing"]["totals"]
    blocks = [0.0, 0.0]
    for record in run.records("step"):
        blocks[(record["step"] - 1) // BLOCK % 2] += record["seconds"]
    saved = (blocks[0] - blocks[1]) / (sum(totals.values()) - totals["start"])
    return {"named": description["headspace"]["share"], "brings": saved}


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.headspace", description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="of blocks")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="by number, from 0")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    before, rows, shares = machine(), [], {}
    with tempfile.TemporaryDirectory() as place:
        for number in options.cases:
            case = CASES[number]
            shares[number] = compared(case, Path(place, str(number)), options.pairs)
            named, saved = shares[number]["named"], shares[number]["brings"]
            sample = f"{case.kind} {case.milliseconds:g} ms"
            rows.append([sample, f"`{case.plan}`", f"{named:.1%}", f"{saved:.1%}", f"{100 * (named - saved):+.1f}"])
    print(f"\n## Headspace\n\nFrom {before}\nto {machine()}.\n")
    print(table(("a sample", "plan", "named", "brings", "points apart"), rows))
    if options.json:
        options.json.write_text(json.dumps(shares, indent=1))


if __name__ == "__main__":
    main()
