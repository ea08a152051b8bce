"""TrainingScores: named losses, and metrics if wanted, over the training batches since the last evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grappe.data.batch import Microbatch
from grappe.launch.world import World
from grappe.private_api.torch import tree_map
from grappe.step.loss import host_copy, read
from grappe.step.scores import Metrics, Number, Scores
from grappe.task import Task, overrides


class SliceSums(NamedTuple):
    """The sums of one process; while they are copied from its device, each tensor is a HostCopy."""

    rank: int
    """Of its data slice."""
    samples: int
    count: Any
    sums: dict[str, Any]
    states: dict[str, dict[str, Any]]


class TrainingScores:
    """Sums that stay on this process and its device until an evaluation, so that no step waits for them.

    Args:
        metrics: whether the task's metrics are computed over training batches, where it has none for these.
    """

    def __init__(self, task: Task, world: World, *, metrics: bool) -> None:
        self._world = world
        self.of_outputs = metrics or overrides(task, "training_metrics")
        """Whether it needs the outputs of training batches."""
        method = "training_metrics" if overrides(task, "training_metrics") else "metrics"
        self._metrics = Metrics(task, world, method) if self.of_outputs else None
        self._nothing_to_show = False
        self._clear()

    def _clear(self) -> None:
        self._samples = 0
        self._count: Tensor | float = 0.0
        self._sums: dict[str, Tensor] = {}

    def add(self, output: Any, micro: Microbatch, named: Mapping[str, Tensor]) -> None:
        """Adds a training microbatch; `named` are the sums of its named losses."""
        if not (named or self._metrics) or not micro.rows:
            return
        self._samples += micro.rows
        # Losses with counts of their own are weighted so that each step's count equals its number of samples.
        self._count = self._count + (micro.weights.sum() if isinstance(micro.weights, Tensor) else micro.rows)
        for name, total in named.items():
            self._sums[name] = self._sums.get(name, 0.0) + total.double()
        if self._metrics is not None:
            with torch.no_grad():
                self._metrics.update(_detached(output, micro), _without_padding(micro))

    def copied(self) -> SliceSums:
        """Begins to copy the sums to the host, as they are now: no step waits for the copies."""
        states = self._metrics.small_states() if self._metrics is not None else {}
        return self._copied(states)

    def so_far(self, copied: SliceSums) -> dict[str, Number]:
        """Returns `training_NAME` of each named loss and metric, over all processes, as of `copied`. Collective.

        Metrics that keep every sample are left out.
        """
        if self._nothing_to_show:
            return {}
        slices = self._gathered(copied)
        scores = _losses(slices)
        if slices and self._metrics is not None:
            scores |= self._metrics.computed_so_far([part.states for part in slices])
        # Every process has the same: from now on all of them gather, or none.
        self._nothing_to_show = self._metrics is None and not scores
        return _named(scores)

    def joined(self, scores: Scores) -> Scores:
        """Returns an evaluation's scores with the scores of the training before it, and starts again. Collective."""
        if not (scores.losses or self._metrics):
            return scores
        states = self._metrics.device_states() if self._metrics is not None else {}
        slices = self._gathered(self._copied(states))
        averages = _losses(slices)
        if slices and self._metrics is not None:
            averages |= self._metrics.computed([part.states for part in slices])
        self._clear()
        if self._metrics is not None:
            self._metrics.reset()
        return dataclasses.replace(scores, metrics={**scores.metrics, **_named(averages)})

    def _copied(self, states: dict[str, dict[str, Any]]) -> SliceSums:
        part = SliceSums(self._world.data_rank, self._samples, self._count, self._sums, states)
        return tree_map(host_copy, part)

    def _gathered(self, copied: SliceSums) -> list[SliceSums]:
        """Gathers the data slices that had a sample, in the order of their ranks. Collective."""
        # Stages before the last have seen no output, and tensor-parallel processes the same ones.
        seen = {part.rank: part for part in self._world.gather(tree_map(read, copied)) if part.samples}
        return [part for _, part in sorted(seen.items())]


def _losses(slices: Sequence[SliceSums]) -> dict[str, Number]:
    """Computes the mean of each named loss."""
    count = sum(float(part.count) for part in slices) or 1.0
    return {
        f"loss_{name}": math.fsum(float(part.sums.get(name, 0.0)) for part in slices) / count
        for name in dict.fromkeys(name for part in slices for name in part.sums)
    }


def _named(scores: Mapping[str, Number]) -> dict[str, Number]:
    return {f"training_{name}": value for name, value in scores.items()}


def _detached(output: Any, micro: Microbatch) -> Any:
    """Returns the output of the samples' rows, without its graph."""
    return tree_map(lambda leaf: _rows(leaf, micro), output)


def _without_padding(micro: Microbatch) -> Microbatch:
    if not micro.padding:
        return micro
    return micro._replace(targets=tree_map(lambda leaf: _rows(leaf, micro), micro.targets), padding=0)


def _rows(leaf: Any, micro: Microbatch) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach()
    return leaf[: micro.rows] if micro.padding and leaf.dim() and len(leaf) == micro.size else leaf
