"""Scores: the results of an evaluation, merged over the processes that saw different samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grappe.data.batch import Batch, Microbatch
from grappe.data.collate import form
from grappe.errors import TaskError
from grappe.errors.user_code import at, sentence
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import tree_map
from grappe.private_api.torchmetrics import default_states, never_synchronise, reductions, states_were_set
from grappe.step.given import metrics_of
from grappe.step.whole_batch import losses_of
from grappe.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The results of an evaluation."""

    samples: int
    """Number of evaluated samples, each counted once."""
    count: float
    """The loss's divisor: the number of samples, or of counted tokens."""
    loss: float
    metrics: Mapping[str, float | list[float]]
    checkpoint: str = ""
    """Of a run that was evaluated: the checkpoint that was taken, and why."""


class Scorer:
    """Accumulates losses and metrics of this process's samples."""

    def __init__(self, task: Task, plan: Plan, world: World) -> None:
        self._world = world
        self._losses, self._task = losses_of(task, plan, world), task
        self._metrics = {name: metric.to(world.device) for name, metric in metrics_of(task).items()}
        for metric in self._metrics.values():
            never_synchronise(metric)  # torchmetrics would merge once more, over the whole world
        self._samples = 0
        self._totals: list[Tensor] = []

    def add(self, output: Any, micro: Microbatch, batch: Batch) -> None:
        """Adds a microbatch of `batch`; padding rows do not count. Collective if the loss is of the whole batch."""
        for total, count in self._losses.scored(output, micro, batch):
            self._totals.append(
                torch.stack([total.double(), torch.as_tensor(count, device=total.device).double()])
            )
        if not micro.rows:
            return
        self._samples += micro.rows
        for name, metric in self._metrics.items():
            try:
                metric.update(output, micro.targets)
            except Exception as error:
                raise TaskError(
                    f"the metric '{name}' does not take what the model and the data give, an output {form(output)} "
                    f"and a target {form(micro.targets)}: {sentence(error, self._task, 'metrics')}"
                ) from error

    def scores(self, expected: int) -> Scores:
        """Computes the scores over all data slices, on every process. Collective.

        Raises:
            TaskError: the number of samples is not `expected`, so a sample was lost or seen twice.
        """
        mine = {
            "samples": self._samples,
            "totals": torch.stack(self._totals).tolist() if self._totals else [],
            "states": {name: _state(metric) for name, metric in self._metrics.items()},
        }
        everyone = self._world.gather_data(mine)
        samples = sum(one["samples"] for one in everyone)
        if samples != expected:
            raise TaskError(
                f"evaluation saw {samples} samples of a dataset of {expected}: its length changed"
            )
        # fsum rounds once, at its end, so neither the order nor the number of processes shows in the loss.
        totals = [pair for one in everyone for pair in one["totals"]]
        total, count = (math.fsum(pair[part] for pair in totals) for part in (0, 1))
        if not count:
            raise TaskError(
                "counts() is 0 for every value of the evaluation's loss: nothing is left to divide by"
                + at(self._task, "counts")
            )
        metrics = {}
        for name, metric in self._metrics.items():
            _merge(metric, [one["states"][name] for one in everyone if one["samples"]])
            metrics[name] = _number(self._task, name, metric.compute())
        return Scores(samples=samples, count=count, loss=total / count, metrics=metrics)


def _state(metric: Any) -> dict[str, Any]:
    return {name: tree_map(lambda leaf: leaf.cpu(), state) for name, state in metric.metric_state.items()}


def _merge(metric: Any, states: list[dict[str, Any]]) -> None:
    """Merges several processes' states into the metric, each state by its own reduction.

    Does the same as torchmetrics when it synchronises (Metric._sync_dist), but over given processes.
    """
    for name, reduce in reductions(metric).items():
        values = [state[name] for state in states]
        merged: Any = (
            torch.stack(values)
            if isinstance(values[0], Tensor)
            else [one for value in values for one in value]
        )
        empty = isinstance(merged, list) and not merged
        if reduce is not None and not empty:
            merged = reduce(merged)
        if isinstance(default_states(metric)[name], list) and isinstance(merged, Tensor):
            merged = [merged]
        setattr(metric, name, tree_map(lambda leaf: leaf.to(metric.device), merged))
    states_were_set(metric)


def _number(task: Task, name: str, value: Any) -> float | list[float]:
    if not isinstance(value, Tensor):
        raise TaskError(
            f"the metric '{name}' computed {form(value)}: it must be a tensor; give metrics() each number by its name"
            + at(task, "metrics")
        )
    return value.item() if value.numel() == 1 else value.tolist()
