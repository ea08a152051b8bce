"""Batches: batches of any number of samples on fake tensors, from a few samples that are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grappe.data.batch import Batch, Microbatch
from grappe.data.loader import BatchLoader, evaluation_loader, training_loader
from grappe.data.prepare import dataset_of
from grappe.data.rows import at_rows
from grappe.errors import PlanError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import tree_map
from grappe.task import Task, overrides

CPU = torch.device("cpu")
SAMPLES = 16  # read from the data; larger batches repeat them
COLLATED = 512  # at most, where the task's collate may pad samples to the longest


class Batches:
    """Batches of any number of samples, from a few that are read."""

    def __init__(self, task: Task, data: Path, mode: Any, split: str = "train") -> None:
        dataset = dataset_of(task, split, data)
        self._task, self._dataset, self._mode, self._trains = task, dataset, mode, split == "train"
        self.samples = len(dataset)
        self._world = World(process=ProcessRank(), device=CPU)
        self._read = self._rehearsed(min(SAMPLES, self.samples))
        self.example = self._loader(2).example()

    def of(self, rows: int) -> Batch:
        """Makes a batch of `rows` samples, without values."""
        read, count = self._read, self._read.microbatches[0].size
        if rows != count and overrides(self._task, "collate") and rows <= min(COLLATED, self.samples):
            read = self._rehearsed(rows)
        elif rows != count:
            micro = read.microbatches[0]
            places = [number % count for number in range(rows)]
            try:
                inputs, targets, weights = at_rows(
                    (micro.inputs, micro.targets, micro.weights), places, count
                )
            except PlanError:  # a batch of graphs, say: it has to be read
                read = self._rehearsed(rows)
            else:
                ids = micro.sample_ids
                if ids is not None:
                    ids = ids._replace(ids=ids.ids[np.array(places)])
                made = Microbatch(inputs, targets, rows, weights, 0, ids)
                read = read._replace(microbatches=(made,), samples=rows)
        micro = read.microbatches[0]
        fake = tree_map(self._fake, (micro.inputs, micro.targets, micro.weights))
        micro = micro._replace(inputs=fake[0], targets=fake[1], weights=fake[2])
        count_of = read.count if isinstance(read.count, float) else self._fake(read.count)
        return read._replace(microbatches=(micro,), count=count_of)

    def inputs(self) -> Any:
        """Makes the example's inputs, without values."""
        return tree_map(self._fake, self.example)

    def _loader(self, rows: int) -> BatchLoader:
        task = dataclasses.replace(self._task, batch_size=rows)
        if self._trains:
            return training_loader(task, self._dataset, Plan(), self._world)
        plan = Plan(validation_batch=None if task.whole_batch_loss else rows)
        return evaluation_loader(task, self._dataset, plan, self._world)

    def _rehearsed(self, rows: int) -> Batch:
        return next(self._loader(min(rows, self.samples)).rehearsed())

    def _fake(self, leaf: Any) -> Any:
        return self._mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf
