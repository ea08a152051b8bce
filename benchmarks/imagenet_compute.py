"""Measures what `imagenet` loses to loading JPEG files: `python -m benchmarks.imagenet_compute FOLDER`.

FOLDER has photographs: `python -m benchmarks.photos FOLDER` cuts some. Two trainings of one process and one thread,
without data workers, take turns of a step: one reads the files, the other has images in memory, as bytes. The share is
the CPU time of a step from memory, over that of a step from files; where data workers have cores of their own, it is
higher.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

from benchmarks.figures import machine, spread, table
from grappe import Arrays, Plan, engines
from grappe.checkpoint.initial import built
from grappe.data.loader import training_loader
from grappe.engines.base import EngineSetup
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.tasks.imagenet import ImageNet

AUGMENTED = {"policy": "trivial", "jitter": 0.4, "erasing": 0.25, "mixup": 0.2, "cutmix": 1.0}


def training(task: ImageNet, dataset: Dataset) -> Iterator[float]:
    """Steps without end: the CPU seconds of each."""
    plan = Plan.parse("threads=1,workers=0")
    world = World(
        process=ProcessRank(rank=0, size=1, local_rank=0, local_size=1),
        device=torch.device("cpu"),
        data_rank=0,
        data_size=1,
    )
    loader = training_loader(task, dataset, plan, world)
    setup = EngineSetup(
        task=task,
        plan=plan,
        world=world,
        weights=built(task),
        total_steps=10_000,
        sample_inputs=loader.example(),
        samples=len(dataset),
    )
    engine = engines.check(plan)(setup)
    batches = loader.batches(0, 10_000)
    while True:
        began = time.process_time()
        engine.step(next(batches))
        yield time.process_time() - began


def main() -> None:
    """Lets both take turns, for each network, and prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imagenet_compute", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for network in ("resnet18", "resnet50"):
        for name, fields in (("", {}), (", augmented", AUGMENTED)):
            classes = len(list((options.folder / "train").iterdir()))
            task = ImageNet(
                network=network, classes=classes, image_size=options.size, batch_size=options.batch, **fields
            )
            files = task.data("train", options.folder)
            images, labels = zip(*(files[index] for index in range(min(512, len(files)))), strict=True)
            memory = Arrays(torch.stack(images), torch.tensor(labels))
            both = training(task, files), training(task, memory)
            steps = [(next(both[0]), next(both[1])) for _ in range(options.rounds + 2)][2:]
            per_image = [1e3 / options.batch * spread(one).median for one in zip(*steps, strict=True)]
            share = spread([memory / files for files, memory in steps])
            rows.append([f"{network}{name}", *(f"{one:.1f}" for one in per_image), share.text("{:.1%}")])
    print(machine())
    head = [f"imagenet, {options.size} px", "files, ms/image", "memory, ms/image", "compute's share"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
