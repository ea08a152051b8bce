"""Makes the order of a task's training samples, as its seed and its `sampling` say."""

from __future__ import annotations

from torch.utils.data import Dataset

from grappe.data.order import SampleOrder
from grappe.data.sampling import DrawnSamples, Sampling
from grappe.errors import TaskError
from grappe.errors.user_code import at, user_call
from grappe.task import Task, overrides


def training_order(task: Task, dataset: Dataset) -> SampleOrder:
    """Returns the order of the training samples, as the task's seed and `sampling` say."""
    drawn = drawn_samples(task, dataset)
    length = len(dataset) if drawn is None else drawn.samples  # type: ignore[arg-type]
    return SampleOrder(seed=task.seed, length=length, batch_size=task.batch_size, sampling=drawn)


def drawn_samples(task: Task, dataset: Dataset) -> DrawnSamples | None:
    """Returns what an epoch has as the task's `sampling` says; None: each sample once.

    Raises:
        TaskError: sampling() fails, or does not fit the dataset.
    """
    if not overrides(task, "sampling"):
        return None
    sampling = user_call(task, "sampling", dataset)
    if sampling is None:
        return None
    if not isinstance(sampling, Sampling):
        raise TaskError(
            f"{type(task).__name__}.sampling() returned {type(sampling).__name__}: return a grappe.Sampling, or None"
            + at(task, "sampling")
        )
    return DrawnSamples(sampling, len(dataset))  # type: ignore[arg-type]
