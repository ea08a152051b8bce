"""CIFAR-10's Python version, written with random pixels: the official names, dictionaries and sizes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

FOLDER = "cifar-10-batches-py"
TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def write(folder: Path, per_file: int = 10_000) -> Path:
    """Six files of `per_file` images and the classes' names; the folder they are in."""
    target = folder / FOLDER
    target.mkdir(parents=True)
    source = np.random.default_rng(0)
    for number, name in enumerate((*TRAINING, "test_batch"), 1):
        content = {
            "batch_label": f"batch {number} of {len(TRAINING)}",
            "labels": source.integers(0, len(CLASSES), per_file).tolist(),
            "data": source.integers(0, 256, (per_file, 3 * 32 * 32), np.uint8),
            "filenames": [f"random_{index:05d}.png" for index in range(per_file)],
        }
        (target / name).write_bytes(pickle.dumps(content, protocol=2))
    names = {"num_cases_per_batch": per_file, "label_names": list(CLASSES), "num_vis": 3072}
    (target / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    return target
