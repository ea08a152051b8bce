"""Shipped tasks, trained a step and exported: `python -m tests.verbs.export.shipped` prints benchmarks.md's table."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.photos import make_photos

from grappe import Task
from grappe.tasks.cifar10 import Cifar10
from grappe.tasks.coatnet import CoAtNet
from grappe.tasks.digits import Digits
from grappe.tasks.fashion_mnist import FashionMnist
from grappe.tasks.imagenet import ImageNet
from grappe.tasks.mnist import Mnist
from grappe.tasks.pysource import PySource
from grappe.training.run import Run
from grappe.verbs.export.export import export
from tests.training.test_training import train


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shipped:
    """A task with fields that keep it small, and what writes its data into a folder."""

    task: Task
    data: Callable[[Path], Any] = str


def write_idx(folder: Path) -> None:
    """Writes images of 28 x 28 pixels in the official form, of which a twelfth is for validation."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("train", 240), ("t10k", 6)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(count, dtype=np.uint8) % 10)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


def write_cifar(folder: Path) -> None:
    """Writes images in CIFAR-10's binary form, of which a tenth is for validation."""
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = random.integers(0, 256, (40, 1 + 3 * 32 * 32), dtype=np.uint8)
        rows[:, 0] = np.arange(40) % 10
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


SHIPPED = {
    "mnist": Shipped(task=Mnist(batch_size=7), data=lambda folder: write_idx(folder / "MNIST" / "raw")),
    "fashion_mnist": Shipped(
        task=FashionMnist(batch_size=7), data=lambda folder: write_idx(folder / "FashionMNIST" / "raw")
    ),
    "digits": Shipped(task=Digits()),
    "cifar10": Shipped(task=Cifar10(batch_size=7), data=write_cifar),
    "cifar10 network=resnet18": Shipped(task=Cifar10(batch_size=7, network="resnet18"), data=write_cifar),
    "imagenet network=resnet18 image_size=32": Shipped(
        task=ImageNet(
            batch_size=7,
            network="resnet18",
            classes=4,
            image_size=32,
            train_images="photos/train",
            validation_images="photos/validation",
        ),
        data=lambda folder: make_photos(folder / "photos", 60),
    ),
    "pysource context=32": Shipped(task=PySource(batch_size=7, context=32, megabytes=0.3)),
    "coatnet side=16": Shipped(task=CoAtNet(side=16)),
}
"""By what is said after `grappe train`, but for sizes of batches and data."""


def exported(name: str, folder: Path) -> dict[str, Any]:
    """Trains a task for a step, and exports it with all proofs; returns its manifest."""
    one = SHIPPED[name]
    one.data(folder)
    run = Run(train(folder / "run", one.task, "threads=1", steps=1).run)  # type: ignore[arg-type]
    done = export(run, folder / "out", task=one.task, data=folder)
    assert done.cpp is None  # built by cmake from the folder, and run
    return json.loads((folder / "out" / "manifest.json").read_text())


def main() -> None:
    """Exports all, and prints a row for each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SHIPPED, default=list(SHIPPED))
    print("| task | samples | at a time | largest difference of a row |\n|---|---|---|---|", flush=True)
    for name in parser.parse_args().only:
        with tempfile.TemporaryDirectory(prefix="grappe-shipped-") as folder:
            proof = exported(name, Path(folder))["proof"]
        sizes = proof["batch_sizes"]
        short = proof["samples"] % sizes[-1]
        told = ", ".join(map(str, sizes)) + (f", {short} at the end" if short else "")
        print(f"| `{name}` | {proof['samples']:,} | {told} | {proof['largest_difference']:.1e} |", flush=True)


if __name__ == "__main__":
    main()
