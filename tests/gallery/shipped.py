"""The shipped tasks at the size of a test: their fields, and small stand-ins for the data that they read."""

from __future__ import annotations

import atexit
import functools
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np

from tests.data.images import pictures

IMAGES = 96
FIELDS: dict[str, dict[str, str]] = {
    "digits": {},
    "mnist": {"batch_size": "16"},
    "fashion_mnist": {"batch_size": "16"},
    "cifar10": {"batch_size": "16"},
    "coatnet": {"batch_size": "8", "side": "16"},
    "pysource": {
        "batch_size": "16",
        "width": "32",
        "depth": "4",
        "heads": "2",
        "context": "32",
        "megabytes": "0.3",
        "dropout": "0.1",
    },
    "imagenet": {"batch_size": "16", "network": "resnet18", "classes": "3", "image_size": "64"},
}
"""By task: the fields that make it small."""
STEPS = {"coatnet": 4, "imagenet": 4}
"""Of the tasks with millions of parameters: steps of a trial."""


@functools.cache
def folder(name: str) -> str | None:
    """A folder with a task's data in the format that it reads; None where it needs none."""
    if name not in ("mnist", "fashion_mnist", "cifar10", "imagenet"):
        return None
    place = Path(tempfile.mkdtemp(prefix=f"grappe-{name}-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    if name == "cifar10":
        _cifar(place / "cifar-10-batches-bin")
    elif name == "imagenet":
        for split in ("train", "val"):
            pictures.folder(place / split, pictures.files(16))
    else:
        _idx(place / ("FashionMNIST" if name == "fashion_mnist" else "MNIST") / "raw")
    return str(place)


def _idx(place: Path) -> None:
    place.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for part in ("train", "t10k"):
        images = draw.integers(0, 256, (IMAGES, 28, 28), dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", np.arange(IMAGES, dtype=np.uint8) % 10)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (place / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())


def _cifar(place: Path) -> None:
    place.mkdir()
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = draw.integers(0, 256, (IMAGES // 5, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        (place / f"{name}.bin").write_bytes(rows.tobytes())
