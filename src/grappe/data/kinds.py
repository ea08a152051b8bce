"""Kinds of data that people have and that are no dataset: each is refused with the line that makes one of it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from grappe.errors import TaskError


def refuse_other_kinds(what: str, data: Any, place: str) -> None:
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
    if isinstance(data, tuple | list) and len(data) == 2 and all(_is_column(one) for one in data):
        raise TaskError(
            f"{what} gave a pair of arrays, not pairs of samples: `return grappe.Arrays(inputs, targets)`{place}"
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        advice = "Is a `return` missing?" if data is None else "list(…) makes one of what can be iterated"
        raise TaskError(
            f"{what} gave {type(data).__name__}: it needs __len__ and __getitem__. {advice}{place}"
        )


def _is_column(one: Any) -> bool:
    return getattr(one, "ndim", 0) > 0 and hasattr(one, "dtype") and len(one) != 2
