"""Shipped tasks go through export: in Python and by the C++ program, at four batch sizes. Digits: test_program.py."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from grappe import Task
from grappe.tasks.fashion_mnist import FashionMnist
from grappe.tasks.mnist import Mnist
from grappe.training.run import Run
from grappe.verbs.export.export import export
from tests.training.test_training import train

TASKS: dict[str, Task] = {"mnist": Mnist(batch_size=7), "fashion_mnist": FashionMnist(batch_size=7)}
FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}


def write_idx(folder: Path) -> None:
    """Images of 28 x 28 pixels in the official form, of which a twelfth is for validation."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("train", 240), ("t10k", 6)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(count, dtype=np.uint8) % 10)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


@pytest.mark.parametrize("name", TASKS)
def test_the_program_predicts_what_the_run_does(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    write_idx(tmp_path / FOLDERS[name] / "raw")
    run = Run(train(tmp_path / "run", task, "threads=1", steps=1).run)  # type: ignore[arg-type]
    done = export(run, tmp_path / "out", task=task, data=tmp_path)
    assert done.cpp is None  # built by cmake from the folder, and run
    assert done.proof.batch_sizes == (1, 2, task.batch_size)
    assert done.proof.samples > task.batch_size
    assert done.proof.samples % task.batch_size  # the fourth size is of the last batch
    known = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert known["proof"]["largest_difference"] <= 1e-5
