"""Splitting by shares: parts that do not overlap, the same in every process, and of arrays without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import grappe
from grappe import Arrays
from grappe.errors import TaskError
from tests.data.test_order import untimed


@settings(untimed, max_examples=40)
@given(length=st.integers(10, 300), validation=st.floats(0.01, 0.4), test=st.floats(0, 0.4), seed=st.integers(0, 99))
def test_parts_cover_and_do_not_overlap(length: int, validation: float, test: float, seed: int) -> None:
    whole = Arrays(torch.arange(length), torch.arange(length))
    names = ["train", "validation", *(["test"] if test else [])]
    parts = [grappe.split(whole, name, validation=validation, test=test, seed=seed) for name in names]
    seen = [int(target) for part in parts for _, target in part]
    assert sorted(seen) == list(range(length))
    assert abs(len(parts[1]) - validation * length) <= 1
    listed = [(torch.tensor(i), i) for i in range(length)]  # what is no array is split alike
    again = [grappe.split(listed, name, validation=validation, test=test, seed=seed) for name in names]
    assert [target for part in again for _, target in part] == seen


def test_arrays_are_shared_and_gathered_at_once() -> None:
    whole = Arrays(torch.arange(40.0).view(20, 2), torch.arange(20), transform=lambda rows: rows + 1)
    part = grappe.split(whole, "train", validation=0.25)
    assert isinstance(part, Arrays) and len(part) == 15
    assert part.inputs.data_ptr() == whole.inputs.data_ptr()
    with pytest.raises(IndexError):
        part[15]
    inputs, targets = part.with_copies().gather(np.array([0, 14, 15]))  # the last is a copy of sample 0
    assert torch.equal(inputs[:, 0], targets * 2.0 + 1)
    assert targets[2] == targets[0]
    tensors = grappe.split(TensorDataset(torch.zeros(8, 1), torch.zeros(8)), "validation", validation=0.5)
    assert isinstance(tensors, Arrays) and len(tensors) == 4
    assert len(grappe.split(part, "validation", validation=0.2)) == 3


@pytest.mark.parametrize("whole", [Arrays(torch.arange(40), torch.arange(40)), [(i, i) for i in range(40)]])
def test_parts_of_a_part_are_its_own(whole: Any) -> None:
    part, other = (grappe.split(whole, name, validation=0.25, seed=1) for name in ("train", "validation"))
    inner = [grappe.split(part, name, validation=0.4, seed=2) for name in ("train", "validation")]
    seen = [sorted(int(target) for _, target in each) for each in (part, other, *inner)]
    assert sorted(seen[2] + seen[3]) == seen[0]
    assert not set(seen[0]) & set(seen[1])


def test_what_cannot_be_split_is_refused() -> None:
    listed = [(torch.tensor(0), 0)] * 10
    for arguments, words in (
        ({"part": "train", "validation": 1.0}, "must be shares of all samples"),
        ({"part": "train", "validation": 0.5, "test": 0.5}, "must be shares of all samples"),
        ({"part": "test"}, "there is no test part: give its share"),
        ({"part": "dev"}, "there is no part 'dev'"),
    ):
        with pytest.raises(TaskError, match=words):
            grappe.split(listed, **arguments)
    with pytest.raises(TaskError, match="1 samples are too few"):
        grappe.split(listed[:1], "train")
