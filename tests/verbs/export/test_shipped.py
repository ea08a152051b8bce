"""Every shipped task goes through export: in Python and by the C++ program, at several batch sizes."""

from __future__ import annotations

import functools
import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks import cifar_files

from grappe import Task, tasks
from grappe.tasks.cifar10 import Cifar10
from grappe.tasks.coatnet import CoAtNet
from grappe.tasks.fashion_mnist import FashionMnist
from grappe.tasks.imagenet import ImageNet
from grappe.tasks.mnist import Mnist
from grappe.tasks.pysource import PySource
from grappe.training.run import Run
from grappe.verbs.export.export import export
from tests.data.images import pictures
from tests.training.test_training import train

ELSEWHERE = {"digits"}  # test_program.py
TINY = {"width": 16, "depth": 2, "heads": 2, "context": 16, "megabytes": 0.01}
TASKS: dict[str, Task] = {
    "mnist": Mnist(batch_size=7),
    "fashion_mnist": FashionMnist(batch_size=7),
    "cifar10": Cifar10(batch_size=7),
    "coatnet": CoAtNet(side=16, batch_size=100),
    "pysource": PySource(**TINY, batch_size=5),
    "imagenet": ImageNet(network="resnet18", classes=len(pictures.CLASSES), image_size=32, batch_size=5),
}


def write_idx(folder: Path) -> None:
    """Images of 28 x 28 pixels in the official form, of which a twelfth is for validation."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("train", 240), ("t10k", 6)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(count, dtype=np.uint8) % 10)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


def write_photographs(folder: Path) -> None:
    pictures.folder(folder / "train", pictures.files())
    pictures.folder(folder / "validation", pictures.files())


DATA: dict[str, Callable[[Path], object]] = {
    "mnist": lambda folder: write_idx(folder / "MNIST" / "raw"),
    "fashion_mnist": lambda folder: write_idx(folder / "FashionMNIST" / "raw"),
    "cifar10": functools.partial(cifar_files.write, per_file=30),
    "imagenet": write_photographs,
}


def test_every_shipped_task_is_here() -> None:
    assert {*TASKS, *ELSEWHERE} == set(tasks.names())


@pytest.mark.parametrize("name", TASKS)
def test_the_program_predicts_what_the_run_does(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    DATA.get(name, lambda folder: None)(tmp_path)
    run = Run(train(tmp_path / "run", task, "threads=1", steps=1).run)  # type: ignore[arg-type]
    done = export(run, tmp_path / "out", task=task, data=tmp_path)
    assert done.cpp is None  # built by cmake from the folder, and run
    assert done.proof.batch_sizes == (1, 2, task.batch_size)
    assert done.proof.samples > task.batch_size
    assert done.proof.samples % task.batch_size  # the fourth size is of the last batch
    known = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert known["proof"]["largest_difference"] <= 1e-5
