"""Data as people have it: pandas frames and series, float64, memory-mapped files."""

import numpy as np
import pytest
import torch

import grappe
from grappe import Arrays
from grappe.errors import TaskError

pandas = pytest.importorskip("pandas")


def frame():
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
