"""Writes images and labels in the form of MNIST's and Fashion-MNIST's official files."""

import gzip
import struct
from pathlib import Path

import numpy as np


def write(folder: Path, training: int, test: int, ending: str = ".gz") -> None:
    """Images of 28 x 28 pixels, of which the first says its number; labels in turn."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for part, count in (("train", training), ("t10k", test)):
        images = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        images[:, 0, 0] = np.arange(count)
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(count, dtype=np.uint8) % 10)):
            content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
            (folder / f"{part}-{name}-ubyte{ending}").write_bytes(gzip.compress(content) if ending else content)
