"""Refusals: why a task's memory and time cannot be foreseen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from grappe.errors import GrappeError, TaskError, user_code
from grappe.task import Task


def refuse_sparse(task: Task, model: nn.Module) -> None:
    """Raises TaskError if the model has sparse gradients."""
    if any(isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse for one in model.modules()):
        raise TaskError(
            f"{type(task).__name__} has sparse gradients (nn.Embedding(sparse=True)), whose size depends on the data: "
            "what they take is not foreseen; grappe measure runs it"
        )


@contextlib.contextmanager
def explained(task: Task, what: str) -> Iterator[None]:
    """Context that explains why a model cannot do `what` on fake tensors."""
    try:
        yield
    except GrappeError:
        raise
    except Exception as error:
        raise TaskError(
            f"{type(task).__name__} cannot {what} without values, so nothing can be said before it runs: "
            f"{user_code.sentence(error)}. Look at tensors' shapes alone, not at their values; or measure it: "
            "grappe measure"
        ) from error
