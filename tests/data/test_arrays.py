"""Arrays of frames, series and memory-mapped files, and parts of them: no copy, no overlap, the same anywhere."""

import warnings
from pathlib import Path
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


def frame():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(
        {"age": [1, 2, 3, 4], "height": [1.5, 2.5, 3.5, 4.5], "city": list("abab"), "label": [0, 1, 0, 1]}
    )


def test_frames_and_series_become_tensors() -> None:
    rows = frame()
    arrays = Arrays(rows[["age", "height"]], rows["label"])
    assert arrays.inputs.dtype == torch.float32
    assert arrays.inputs.tolist() == [[1, 1.5], [2, 2.5], [3, 3.5], [4, 4.5]]
    assert arrays.targets.dtype == torch.int64
    assert arrays.targets.tolist() == [0, 1, 0, 1]
    whole = Arrays({"a": rows[["age"]]}, rows["label"].astype("Int64"))
    assert whole.inputs["a"].dtype == torch.int64
    part = grappe.split(Arrays(rows.sample(frac=1, random_state=0)[["age"]], rows["label"]), "validation")
    assert len(part) == 1


def test_what_is_no_number_is_named() -> None:
    rows = frame()
    with pytest.raises(TaskError, match=r"column 'city' holds no numbers but .*cat.codes"):
        Arrays(rows[["age", "city"]], rows["label"])
    rows.loc[2, "height"] = None
    with pytest.raises(TaskError, match="column 'height' has 1 missing values"):
        Arrays(rows[["height"]], rows["label"])
    with pytest.raises(TaskError, match=r"ndarray of .* is not an array of numbers"):
        Arrays(np.array(["a", "b"]), np.zeros(2))


def test_what_torch_does_not_take_as_it_is_is_copied() -> None:
    images = np.arange(24, dtype="uint8").reshape(2, 4, 3)
    assert Arrays(images[..., ::-1], [0, 1]).inputs[0, 0].tolist() == [2, 1, 0]
    assert Arrays(np.array([1.5, 2], ">f4"), [0, 1]).inputs.tolist() == [1.5, 2]
    assert Arrays([[1.0, 2.0], [3.0, 4.0]], [0, 1]).inputs.shape == (2, 2)
    assert Arrays(np.ma.array([1, 2], mask=[False, False]), [0, 1]).inputs.tolist() == [1, 2]
    with pytest.raises(TaskError, match=r"values that are missing: fill them, as in array.filled\(0\)"):
        Arrays(np.ma.array([1, 2], mask=[False, True]), [0, 1])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([np.ones(4)] * 6, r"different lengths: \[4, 6\] \(a list of arrays is several inputs: np.stack"),
        (np.ones(5), r"different lengths: \[5, 6\]$"),
    ],
)
def test_what_has_no_row_for_each_sample_is_named(inputs: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        Arrays(inputs, [0] * 6)


def test_rows_may_be_tuples() -> None:
    assert Arrays([(1.0, 2.0)] * 6, [0] * 6)[0][0].tolist() == [1, 2]
