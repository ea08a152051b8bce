"""Datasets: a training's samples, of both splits, and the loaders that make batches of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grappe.data import loader
from grappe.data.order import SampleOrder
from grappe.data.prepare import dataset_of, refuse_differing_lengths
from grappe.data.workers import explaining_ended_workers
from grappe.errors.user_code import naming_user_line
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.profiling.chronometer import Chronometer
from grappe.task import Task
from grappe.training.opening import Opened


class Data(NamedTuple):
    """The task's datasets."""

    train: Any
    validation: Any
    order: SampleOrder
    """Of the training samples."""


def read(task: Task, folder: Path, world: World) -> Data:
    """Makes the task's datasets, and the order of its training samples. Collective."""
    train, validation = (dataset_of(task, split, folder) for split in ("train", "validation"))
    refuse_differing_lengths(world, {"training": len(train), "validation": len(validation)})
    with naming_user_line(task):
        order = loader.training_order(task, train)
    return Data(train=train, validation=validation, order=order)


@contextlib.contextmanager
def loaders(
    task: Task, data: Data, plan: Plan, world: World, opened: Opened, chronometer: Chronometer | None
) -> Iterator[tuple[loader.BatchLoader, loader.BatchLoader]]:
    """Context with the loaders of training and validation; without a chronometer nothing is tried out in the steps."""
    batches = loader.training_loader(task, data.train, plan, world, data.order)
    validation = loader.evaluation_loader(task, data.validation, plan, world)

    def chosen(loading: Mapping[str, Any]) -> None:
        if world.rank == 0:
            opened.check_lease()
            with contextlib.suppress(OSError):  # a full disk is reported by the next checkpoint
                opened.run.describe(loading=dict(loading))

    if chronometer is not None and batches.loading is not None:
        batches.sources.tune(chronometer.spent, opened.run.read_description().get("loading"), chosen)
        validation.sources.like = batches.sources
    try:
        with explaining_ended_workers():
            yield batches, validation
    finally:
        batches.sources.close()
        validation.sources.close()
