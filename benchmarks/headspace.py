"""Compares the headspace that a run names with what removing the cost of data brings: `python -m benchmarks.headspace`.

One training in which loading a sample costs time in every second block of eight steps: sleeping, as a disk lets one
wait, or computing, as a decoder does. What removing the cost brings is the difference between neighbouring blocks, so
that what else the machine does is in both. The network takes a fixed time, as one on a device of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import grappe
from benchmarks.figures import machine, table

SIDE, CLASSES, BATCH = 32, 10, 32
BLOCK = 8
STEP_SECONDS = 0.1
CASES = (
    ("sleeps", 1.0, "workers=0"),
    ("sleeps", 3.0, "workers=0"),
    ("sleeps", 10.0, "workers=2,loading=threads"),
    ("computes", 1.0, "workers=0"),
    ("computes", 4.0, "workers=1,loading=threads"),
)
costs = [True]
"""Whether loading costs time now."""


class Costly(Dataset):
    """Random images, each of which costs `milliseconds`."""

    keyed = True

    def __init__(self, samples: int, milliseconds: float, kind: str) -> None:
        self._image = torch.zeros(3, SIDE, SIDE)
        self._samples, self._seconds, self._kind = samples, milliseconds / 1e3, kind

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.sample(index, 0)

    def sample(self, index: int, key: int) -> tuple[torch.Tensor, int]:
        """Returns an image after a while."""
        if costs[0] and self._kind == "sleeps":
            time.sleep(self._seconds)
        elif costs[0]:
            stop = time.thread_time() + self._seconds
            while time.thread_time() < stop:
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
        return nn.Sequential(
            nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten()), nn.Linear(48, CLASSES), Pause()
        )

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
        costs[0] = not costs[0]


def compared(kind: str, milliseconds: float, plan: str, place: Path, pairs: int) -> tuple[float, float]:
    """The share of a training's time that is named, and the share that is brought."""
    costs[0] = True
    run = grappe.train(
        Waiting(kind=kind, milliseconds=milliseconds, pairs=pairs),
        f"{plan},threads=1,device=cpu",
        place / f"{kind}-{milliseconds}",
        options=grappe.Options(evaluate_every=BLOCK),
        watchers=[Switch()],
    )
    known = run.read_description()
    totals = known["costs"][0]["timing"]["totals"]
    whole = sum(totals.values()) - totals["start"]
    blocks = [0.0, 0.0]
    for record in run.records("step"):
        blocks[(record["step"] - 1) // BLOCK % 2] += record["seconds"]
    return known["headspace"]["share"], (blocks[0] - blocks[1]) / whole


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.headspace", description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="of blocks")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    before, rows, found = machine(), [], {}
    with tempfile.TemporaryDirectory() as place:
        for kind, milliseconds, plan in CASES:
            named, brought = compared(kind, milliseconds, plan, Path(place), options.pairs)
            found[f"{kind} {milliseconds} {plan}"] = {"named": named, "brought": brought}
            apart = f"{100 * (named - brought):+.1f}"
            rows.append([f"{kind} {milliseconds:g} ms", f"`{plan}`", f"{named:.1%}", f"{brought:.1%}", apart])
    print(f"\n## Headspace\n\nFrom {before}\nto {machine()}.\n")
    print(table(("a sample", "plan", "named", "brings", "points apart"), rows))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
