"""Checks that data is a map-style dataset; other kinds are refused with the line that makes one of them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from grappe.errors import TaskError
from grappe.errors.user_code import at, line_of
from grappe.task import Task


def check(dataset: object, split: str, task: Task) -> int:
    """Returns the dataset's length.

    Raises:
        TaskError: the dataset is not map-style, or is empty.
    """
    name = type(task).__name__
    if isinstance(dataset, IterableDataset):
        raise TaskError(
            f"{name}.data({split!r}) is an IterableDataset: it cannot be shuffled, cut or resumed exactly, since "
            "samples are asked for by index, and each process would read the whole stream. Give a map-style dataset "
            "(__len__ and __getitem__); write a stream out once, in prepare(): docs/data.md says how"
        )
    _refuse_other_kinds(f"{name}.data({split!r})", dataset, at(task, "data"))
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except Exception as error:
        line = line_of(error)
        place = f" ({line})" if line else at(type(dataset), "__len__")
        raise TaskError(
            f"{name}.data({split!r}) has no length: {error}{place}. __len__ must return how many samples there are"
        ) from error
    if length == 0:
        place = at(type(dataset), "__len__") or at(task, "data")
        raise TaskError(f"{name}.data({split!r}) is empty: check the folder and the split{place}")
    return length


def _refuse_other_kinds(what: str, data: Any, place: str) -> None:
    """Raises TaskError where `data` is no map-style dataset; `what` gave it, at `place`."""
    if isinstance(data, DataLoader):
        raise TaskError(
            f"{what} gave a DataLoader: give its dataset, `return loader.dataset`; grappe makes the batches, by the "
            f"task's batch_size, its collate() and the plan's workers{place}"
        )
    if type(data).__name__ in ("DataFrame", "Series") and hasattr(data, "iloc"):
        raise TaskError(
            f"{what} gave a {type(data).__name__}, whose columns do not say what is input and what is target: "
            f"`return grappe.Arrays(frame[[…]], frame['…'])`{place}"
        )
    if isinstance(data, tuple | list) and len(data) == 2 and all(_is_column(column) for column in data):
        raise TaskError(
            f"{what} gave a pair of arrays, not pairs of samples: `return grappe.Arrays(inputs, targets)`{place}"
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        advice = "Is a `return` missing?" if data is None else "list(…) makes one of what can be iterated"
        raise TaskError(
            f"{what} gave {type(data).__name__}: it needs __len__ and __getitem__. {advice}{place}"
        )


def _is_column(column: Any) -> bool:
    return getattr(column, "ndim", 0) > 0 and hasattr(column, "dtype") and len(column) != 2
