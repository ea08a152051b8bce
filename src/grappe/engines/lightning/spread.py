"""Spread: a training's parts under Lightning with torch's own parallelism: DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from grappe.data.batch import Batch
from grappe.engines.base import EngineSetup
from grappe.engines.lightning.steps import Item, Steps
from grappe.engines.shared.microbatch import evaluate
from grappe.engines.shared.state import ModelState, TrainState, trained_parameters
from grappe.parallel.parallelize import parallelize
from grappe.parallel.shard import reduction_switch, uses_shard
from grappe.step.clip import clipping, gradient_norm
from grappe.step.precision import LossScale
from grappe.step.scores import Scores
from grappe.step.task_contract import optimizer_of, schedule_of


class Spread:
    """The model that `parallelize` returns; Lightning wraps it in DDP if the plan replicates."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        task, plan, world = setup.task, setup.plan, setup.world
        model = parallelize(task, plan, world, setup.weights)
        named = trained_parameters(model)
        parameters = [parameter for _, parameter in named]
        optimizer = optimizer_of(task, named)
        setup.observers.optimizer(optimizer, named)
        schedule = schedule_of(task, optimizer, setup.total_steps)
        self.train_state: TrainState = ModelState(
            model=model, optimizer=optimizer, schedule=schedule, world=world
        )
        norm = functools.partial(gradient_norm, parameters)
        self._clipping = clipping(task, plan, LossScale(plan.precision), parameters, norm)
        # Lightning divides by the microbatches, and DDP by the processes where FSDP2 is made to sum.
        summed = uses_shard(plan) or world.data_group is None
        self.steps = Steps(
            setup,
            model=model,
            forward=functools.partial(task.forward, model),
            optimizer=optimizer,
            schedule=schedule,
            gradient_divisor=float(plan.microbatches * (1 if summed else world.data_size)),
            switch=reduction_switch(model, plan),
            loss_context=contextlib.nullcontext(),  # Lightning's own is around it
            clip=self._clip,
            after_update=lambda: None,
        )

    def _clip(self) -> Tensor | None:
        return None if self._clipping is None else self._clipping()[0]

    def strategy(self, first: Item) -> Any:
        """Makes Lightning's strategy for the plan. Collective."""
        from grappe.engines.lightning import strategies

        return strategies.choose(self.steps, first)

    def training(self) -> contextlib.AbstractContextManager[Any]:
        """Context of all steps; does nothing."""
        return contextlib.nullcontext()

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """Computes the scores over all data slices. Collective."""
        return evaluate(self.steps.model, self._setup, batches, samples)

    def remarks(self) -> Sequence[str]:
        """Returns no remarks."""
        return ()

    def close(self) -> None:
        """Does nothing: there is nothing to release."""
