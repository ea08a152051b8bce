"""Splits a dataset that is in one piece into training, validation and test samples."""

from __future__ import annotations

import numpy as np
from torch.utils.data import Dataset, Subset

from grappe.data.arrays import in_memory
from grappe.data.draw import mix
from grappe.data.permute import permute
from grappe.errors import TaskError

_SPLIT = 0x7370  # a word of the key, so that the order is no epoch's


def split(
    dataset: Dataset, part: str, *, validation: float = 0.1, test: float = 0.0, seed: int = 0
) -> Dataset:
    """Returns a part of a dataset, for `Task.data`: `return grappe.split(dataset, split, validation=0.1)`.

    The samples are drawn by `seed` and the dataset's length alone, so every process and every start has the same; the
    task's own seed does not move them. Arrays stay where they are, memory-mapped ones too.

    Args:
        part: "train", "validation" or "test".
        validation: the share of the samples that are for validation, 0 to 1; at least one sample.
        test: the share for the test.

    Raises:
        TaskError: a share is out of its range, or a part has no sample.
    """
    length = len(dataset)  # type: ignore[arg-type]
    if not (0 < validation < 1 and 0 <= test < 1 and validation + test < 1):
        raise TaskError(
            f"split(): validation={validation} and test={test} must be shares of all samples, and leave some to train "
            "on"
        )
    if part == "test" and not test:
        raise TaskError("split(): there is no test part: give its share, as in test=0.1")
    sizes = {
        "validation": max(1, round(validation * length)),
        "test": max(1, round(test * length)) if test else 0,
    }
    sizes["train"] = length - sum(sizes.values())
    if part not in sizes:
        raise TaskError(f"split(): there is no part {part!r}: train, validation, test")
    if sizes["train"] < 1:
        raise TaskError(f"split(): {length} samples are too few for these parts")
    order = permute(np.arange(length, dtype=np.int64), key=mix(seed, _SPLIT), length=length)
    ends = np.cumsum([sizes["validation"], sizes["test"]])
    drawn = dict(zip(("validation", "test", "train"), np.split(order, ends), strict=True))[part]
    rows = np.sort(drawn)  # neighbours on a disk are read together
    arrays = in_memory(dataset)
    return Subset(dataset, rows.tolist()) if arrays is None else arrays.rows(rows)
