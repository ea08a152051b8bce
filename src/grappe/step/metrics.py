"""Metrics: a task's metrics over this process's samples, merged over the processes that saw others."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grappe.data.batch import Microbatch
from grappe.data.collate import form
from grappe.errors import TaskError
from grappe.errors.user_code import at, calls_users, sentence
from grappe.launch.world import World
from grappe.private_api.torch import tree_map
from grappe.private_api.torchmetrics import default_states, never_synchronise, reductions, states_were_set
from grappe.step.task_contract import metrics_of
from grappe.task import Task

Number = float | list[float]


class Metrics:
    """The metrics of a task, made anew."""

    def __init__(self, task: Task, world: World) -> None:
        self._task = task
        self._metrics = {name: metric.to(world.device) for name, metric in metrics_of(task).items()}
        for name, metric in self._metrics.items():
            if world.size > 1 and not default_states(metric):
                raise TaskError(
                    f"the metric '{name}' has no state of its own that processes could merge: give the metrics that "
                    f"it is made of, each by its name, or keep what it counts by add_state(){at(task, 'metrics')}"
                )
            never_synchronise(metric)  # torchmetrics would merge once more, over the whole world

    def update(self, output: Any, micro: Microbatch) -> None:
        """Adds a microbatch's samples.

        Raises:
            TaskError: a metric does not take the output and the targets.
        """
        for name, metric in self._metrics.items():
            try:
                metric.update(output, micro.targets)
            except Exception as error:
                raise TaskError(
                    f"the metric '{name}' does not take what the model and the data give, an output {form(output)} "
                    f"and a target {form(micro.targets)}: {sentence(error, self._task, 'metrics')}"
                ) from error

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns each metric's state, on the CPU."""
        return tree_map(lambda leaf: leaf.cpu(), self.device_states())

    def device_states(self) -> dict[str, dict[str, Any]]:
        """Returns each metric's state, which later updates change in place."""
        return {name: dict(metric.metric_state) for name, metric in self._metrics.items()}

    def small_states(self) -> dict[str, dict[str, Any]]:
        """Returns the states of the metrics that do not keep every sample."""
        return {
            name: states
            for name, states in self.device_states().items()
            if not any(isinstance(state, list) for state in default_states(self._metrics[name]).values())
        }

    def computed(self, everyone: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, Number]:
        """Computes each metric from the `states` of all processes that had a sample.

        Raises:
            TaskError: a metric cannot be computed.
        """
        results = {}
        for name, metric in self._metrics.items():
            _merge(metric, [states[name] for states in everyone])
            try:
                value = metric.compute()
            except Exception as error:
                raise TaskError(
                    f"the metric '{name}' cannot be computed: {sentence(error, self._task, 'metrics')}"
                ) from error
            results[name] = _number(self._task, name, value)
        return results

    def computed_so_far(self, everyone: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, Number]:
        """Computes those of the `small_states` that few samples are enough for; changes nothing."""
        results = {}
        for name in everyone[0]:
            metric = copy.deepcopy(self._metrics[name])
            _merge(metric, [states[name] for states in everyone])
            with contextlib.suppress(Exception):  # an evaluation says it, if more samples do not help
                results[name] = _number(self._task, name, metric.compute())
        return results

    def reset(self) -> None:
        """Forgets all samples."""
        for metric in self._metrics.values():
            metric.reset()


@calls_users("a metric")
def _merge(metric: Any, states: list[dict[str, Any]]) -> None:
    """Merges several processes' states into the metric, each state by its own reduction.

    Does the same as torchmetrics when it synchronises (Metric._sync_dist), but over given processes.
    """
    for name, reduce in reductions(metric).items():
        values = [state[name] for state in states]
        merged: Any = (
            torch.stack(values)
            if isinstance(values[0], Tensor)
            else [item for value in values for item in value]
        )
        empty = isinstance(merged, list) and not merged
        if reduce is not None and not empty:
            merged = reduce(merged)
        if isinstance(default_states(metric)[name], list) and isinstance(merged, Tensor):
            merged = [merged]
        setattr(metric, name, tree_map(lambda leaf: leaf.to(metric.device), merged))
    states_were_set(metric)


@calls_users("a metric")
def _number(task: Task, name: str, value: Any) -> float | list[float]:
    if not isinstance(value, Tensor):
        raise TaskError(
            f"the metric '{name}' computed {form(value)}: it must be a tensor; give metrics() each number by its name"
            + at(task, "metrics")
        )
    return value.item() if value.numel() == 1 else value.tolist()
