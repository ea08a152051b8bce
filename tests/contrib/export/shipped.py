"""Shipped tasks, trained a step and exported: `python -m tests.contrib.export.shipped` prints benchmarks.md's table."""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import cifar_files
from benchmarks.photos import make_photos

from grappe import Task
from grappe.contrib.export.export import export
from grappe.tasks.cifar10 import Cifar10
from grappe.tasks.coatnet import CoAtNet
from grappe.tasks.digits import Digits
from grappe.tasks.fashion_mnist import FashionMnist
from grappe.tasks.imagenet import ImageNet
from grappe.tasks.mnist import Mnist
from grappe.tasks.pysource import PySource
from grappe.training.run import Run
from tests import idx_files
from tests.training.test_training import train


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shipped:
    """A task with fields that keep it small, and what writes its data into a folder."""

    task: Task
    data: Callable[[Path], Any] = str


def idx(name: str) -> Callable[[Path], None]:
    """Writes images, of which a twelfth is for validation."""
    return lambda folder: idx_files.write(folder / name / "raw", 240, 6)


def cifar(folder: Path) -> None:
    """Writes images, of which a tenth is for validation."""
    cifar_files.write(folder, per_file=40)


PHOTOS = {"train_images": "photos/train", "validation_images": "photos/validation"}

SHIPPED = {
    "mnist": Shipped(task=Mnist(batch_size=7), data=idx("MNIST")),
    "fashion_mnist": Shipped(task=FashionMnist(batch_size=7), data=idx("FashionMNIST")),
    "digits": Shipped(task=Digits()),
    "cifar10": Shipped(task=Cifar10(batch_size=7), data=cifar),
    "cifar10 network=resnet18": Shipped(task=Cifar10(batch_size=7, network="resnet18"), data=cifar),
    "imagenet network=resnet18 image_size=32": Shipped(
        task=ImageNet(batch_size=7, network="resnet18", classes=4, image_size=32, **PHOTOS),
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
