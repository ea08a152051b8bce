"""Takes rows of batches, however they nest: tensors with a row a sample, lists with an entry a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grappe.errors import PlanError


def at_rows(batch: Any, places: Sequence[int], count: int) -> Any:
    """The rows `places` of a batch of `count` samples; numbers and words of the whole batch stay as they are.

    Raises:
        PlanError: something in it has no row for each sample.
    """
    if isinstance(batch, Tensor) and batch.dim():
        if len(batch) == count:
            return batch[torch.tensor(places, dtype=torch.int64, device=batch.device)]
        raise PlanError(f"{_WHY}: a tensor has {list(batch.shape)} for {count} samples. {_INSTEAD}")
    if isinstance(batch, Mapping):
        return {key: at_rows(value, places, count) for key, value in batch.items()}
    if isinstance(batch, list) and len(batch) == count and not _are_columns(batch, count):
        return [batch[place] for place in places]
    if isinstance(batch, tuple | list):
        return type(batch)([at_rows(value, places, count) for value in batch])
    if batch is None or isinstance(batch, Tensor | str | int | float | bool):
        return batch
    raise PlanError(f"{_WHY}: there is a {type(batch).__name__} in it. {_INSTEAD}")


_WHY = "a pipeline cuts each batch into microbatches, row by row, and what collate() gave cannot be cut so"
_INSTEAD = "Give tensors with a row for each sample, or use replicate= or shard="


def _are_columns(batch: list[Any], count: int) -> bool:
    """Returns whether a list has several tensors of all samples in it, and not a sample in each entry."""
    return all(isinstance(value, Tensor) and value.dim() and len(value) == count for value in batch)
