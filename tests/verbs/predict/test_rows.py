"""Predictions are cut by row, however an output nests, and written as JSON or arrays."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grappe.errors import TaskError, UsageError
from grappe.verbs.predict.predict import as_json, rows, save

A, B = torch.arange(6.0).view(3, 2), torch.arange(3)


@pytest.mark.parametrize(
    ("output", "count", "last"),
    [
        (A, 3, {"output": [4.0, 5.0]}),
        (B, 3, {"output": 2}),
        ((A, B), 3, {"output": [[4.0, 5.0], 2]}),
        ((A[:2], B[:2]), 2, {"output": [[2.0, 3.0], 1]}),  # as many as there are samples, and yet columns
        ([A[:2], B[:2]], 2, {"output": [[2.0, 3.0], 1]}),
        ({"logits": A, "hidden": (A, None)}, 3, {"logits": [4.0, 5.0], "hidden": [[4.0, 5.0], None]}),
        (OrderedDict(loss=torch.tensor(1.5), logits=B), 3, {"loss": 1.5, "logits": 2}),
        ([{"boxes": torch.ones(n, 4)} for n in (1, 0, 2)], 3, {"boxes": [[1.0] * 4] * 2}),
        ({"text": ["a", "b", "c"], "score": B}, 3, {"text": "c", "score": 2}),
        (["a", "b", "c"], 3, {"output": "c"}),
    ],
)
def test_a_row_each(output: Any, count: int, last: dict[str, Any]) -> None:
    found = list(rows(output, count, "Mine"))
    assert len(found) == count
    assert json.loads(json.dumps(as_json(found[-1]))) == last


def test_what_has_no_row_each_is_refused() -> None:
    with pytest.raises(
        TaskError, match=r"Mine's model has \[6\], no row for each of 3 samples: give Mine a pred"
    ):
        list(rows({"a": A, "b": torch.ones(6)}, 3, "Mine"))
    with pytest.raises(TaskError, match="a prediction is a object"):
        as_json(object())


def test_arrays(tmp_path: Path) -> None:
    save(tmp_path / "one.npy", rows(A, 3, "Mine"))
    assert np.array_equal(np.load(tmp_path / "one.npy"), A.numpy())
    save(tmp_path / "two.npz", rows({"a": A, "b": B}, 3, "Mine"))
    assert np.array_equal(np.load(tmp_path / "two.npz")["b"], B.numpy())
    with pytest.raises(UsageError, match=r"predictions have a, b: give a file that ends in .npz"):
        save(tmp_path / "two.npy", rows({"a": A, "b": B}, 3, "Mine"))
    with pytest.raises(UsageError, match="several forms or shapes"):
        save(tmp_path / "x.npy", rows([torch.ones(n) for n in (1, 2)], 2, "Mine"))


def test_a_tensor_without_numbers_is_said() -> None:
    with pytest.raises(TaskError, match="a tensor on the device meta"):
        as_json({"score": torch.ones(2, device="meta")})
