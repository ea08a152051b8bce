"""Measures the way from JPEG files to a normalised float batch: `python -m benchmarks.images`.

grappe's loader beside torchvision's recipe in a DataLoader (`torchvision_recipe.py`), on the same files, before and
after `grappe data pack --short 256`. All contenders live in one process with their workers and take turns; CPU time is
that of this process in a contender's turn and of its workers since its last turn, so that what they load ahead counts.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch.utils.data import DataLoader

from benchmarks.figures import machine, spread, table
from benchmarks.photos import photographs
from benchmarks.torchvision_recipe import ImageFolder
from grappe import Plan, Task
from grappe.data import Images, Normalise, RandomResizedCrop
from grappe.data.loader import training_loader
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.verbs.data.pack import Packing, pack

BATCH = 32
CLASSES = 4
FIRST = "torchvision's recipe"
TICKS = os.sysconf("SC_CLK_TCK")


class Loading(Task):
    """A batch size: nothing is trained."""

    batch_size: int = BATCH


class Turn(NamedTuple):
    """One contender's turn: milliseconds an image."""

    cpu: float
    wall: float


class Contender:
    """Batches without end, and the processes that make them."""

    def __init__(self, batches: Iterator[torch.Tensor]) -> None:
        before = {one.pid for one in multiprocessing.active_children()}
        self._batches = batches
        self._take(2)
        self.workers = [one.pid for one in multiprocessing.active_children() if one.pid not in before]
        self._worked = self._workers_seconds()

    def turn(self, count: int) -> Turn:
        """Takes `count` batches."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._take(count)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        worked, self._worked = self._worked, self._workers_seconds()
        return Turn(1e3 * (cpu + self._worked - worked) / (count * BATCH), 1e3 * wall / (count * BATCH))

    def _take(self, count: int) -> None:
        for _ in range(count):
            batch = next(self._batches)
            assert batch.dtype == torch.float32 and batch.shape == (BATCH, 3, 224, 224)

    def _workers_seconds(self) -> float:
        """CPU time of the workers so far: user and system."""
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.workers]
        return sum(int(one[11]) + int(one[12]) for one in fields) / TICKS


def by_hand(folder: Path, workers: int) -> Iterator[torch.Tensor]:
    """Batches of torchvision's recipe."""
    loader = DataLoader(
        ImageFolder(folder), BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True
    )
    while True:
        for images, _ in loader:
            yield images


def by_grappe(source: Path, workers: int) -> Iterator[torch.Tensor]:
    """Batches as a training on one process has them, behind the model's first layer."""
    world = World(
        process=ProcessRank(rank=0, size=1, local_rank=0, local_size=1),
        device=torch.device("cpu"),
        data_rank=0,
        data_size=1,
    )
    data = Images(source, RandomResizedCrop(size=224))
    loader, normalise = training_loader(Loading(), data, Plan.parse(f"workers={workers}"), world), Normalise()
    for batch in loader.batches(0, sys.maxsize):
        images: Any = batch.microbatches[0].inputs
        if len(images) == BATCH:
            yield normalise(images)


def photos(folder: Path, count: int, quality: int) -> float:
    """Cuts photos of 500 x 375, ImageNet's most frequent size, into class folders; their mean size in kB."""
    draw = random.Random(0)
    found = [one for _, one in photographs() if one.width >= 520 and one.height >= 395]
    total = 0
    for number in range(count):
        picture = draw.choice(found)
        left, top = draw.randint(0, picture.width - 500), draw.randint(0, picture.height - 375)
        part = picture.crop((left, top, left + 500, top + 375))
        if number % 2:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        place = folder / f"class{number % CLASSES}" / f"{number:05d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        stream = io.BytesIO()
        part.save(stream, "JPEG", quality=quality)
        total += place.write_bytes(stream.getvalue())
    return total / count / 1e3


def main() -> None:
    """Lets all take turns, and prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.images", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=12, help=f"of {BATCH} images in each turn")
    parser.add_argument("--images", type=int, default=800)
    parser.add_argument("--quality", type=int, default=95, help="of the JPEG files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as folder:
        files, packed = Path(folder) / "photos", Path(folder) / "packed"
        size = photos(files, options.images, options.quality)
        small = pack(files, packed, Packing(short=256)).bytes / options.images / 1e3
        before, n = machine(), options.workers
        made = {
            FIRST: by_hand(files, n),
            f"grappe, {n} workers": by_grappe(files, n),
            "grappe, in process": by_grappe(files, 0),
            f"grappe, packed, {n} workers": by_grappe(packed, n),
            "grappe, packed, in process": by_grappe(packed, 0),
        }
        contenders = {name: Contender(batches) for name, batches in made.items()}
        found: dict[str, list[Turn]] = {name: [] for name in contenders}
        for number in range(options.rounds):
            order = [*contenders][number % len(contenders) :] + [*contenders][: number % len(contenders)]
            for name in order:
                found[name].append(contenders[name].turn(options.batches))
    print(f"\n## From JPEG files to a float batch of 224 x 224\n\nFrom {before}\nto {machine()}.")
    print(f"{options.images} photos of 500 x 375, {size:.0f} kB each; packed to short side 256, {small:.0f} kB.\n")
    print(table(("", "CPU ms an image", "images/s a core", "over the recipe"), rows(found)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def rows(found: dict[str, list[Turn]]) -> list[list[str]]:
    """A row for each; ratios are taken within a round, then their median."""
    made = []
    for name, turns in found.items():
        cpu = spread([one.cpu for one in turns])
        ratio = spread([a.cpu / b.cpu for a, b in zip(found[FIRST], turns, strict=True)]).text("{:.2f}")
        made.append([name, cpu.text("{:.2f}"), f"{1e3 / cpu.median:,.0f}", "" if name == FIRST else ratio])
    return made


if __name__ == "__main__":
    main()
