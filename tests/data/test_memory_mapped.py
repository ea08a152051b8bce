"""Memory-mapped files: batches are read from the disk as they are asked for, without a copy of the file."""

import warnings
from pathlib import Path

import numpy as np
import torch

from grappe import Arrays


def test_a_mapped_file_is_not_copied(tmp_path: Path) -> None:
    stored = np.arange(60, dtype=np.float32).reshape(20, 3)
    np.save(tmp_path / "inputs.npy", stored)
    mapped = np.load(tmp_path / "inputs.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays = Arrays(mapped, torch.arange(20))
    assert arrays.inputs.data_ptr() == mapped.ctypes.data
    inputs, targets = arrays.gather(np.array([19, 0]))
    assert inputs.tolist() == stored[[19, 0]].tolist()
    assert targets.tolist() == [19, 0]
    inputs.add_(1)  # a batch is a copy: the file stays
    assert np.array_equal(np.load(tmp_path / "inputs.npy"), stored)
