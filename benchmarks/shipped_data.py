"""Small stand-ins for the files that shipped tasks read: random pixels in the official forms, and photographs."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import cifar_files
from benchmarks.photos import make_photos
from grappe.training.request import DATA_FOLDER

IMAGES = 4096
PHOTOGRAPHS = 512


@functools.cache
def use() -> None:
    """Makes a folder with the files of every shipped task, which this process and those that it starts read."""
    folder = Path(tempfile.mkdtemp(prefix="grappe-shipped-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    data = folder / "data"
    make_photos(data, PHOTOGRAPHS)
    cifar_files.write(data, IMAGES // 4)
    for name in ("mnist", "fashion_mnist"):
        _idx(data / name)
    os.environ[DATA_FOLDER] = str(data)


def _idx(folder: Path) -> None:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for part in ("train", "t10k"):
        images = draw.integers(0, 256, (IMAGES, 28, 28), dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", np.arange(IMAGES, dtype=np.uint8) % 10)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())
