"""The parts of a training that Lightning runs, and of each step that its hooks call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from grappe.data.batch import Batch, Microbatch, stored_in
from grappe.engines.base import EngineSetup
from grappe.engines.shared.after_step import AfterStep
from grappe.engines.shared.microbatch import MicrobatchRunner, draws, evaluate
from grappe.engines.shared.state import ModelState, TrainState, trained_parameters
from grappe.parallel.parallelize import parallelize
from grappe.parallel.shard import reduction_switch
from grappe.profiling.phases import UPDATE
from grappe.step.clip import clipping, gradient_norm
from grappe.step.loss import StepResult, loss_reduction
from grappe.step.precision import LossScale
from grappe.step.scores import Scores
from grappe.step.task_contract import optimizer_of, schedule_of
from grappe.task import overrides


class Item(NamedTuple):
    """One microbatch of a step, which Lightning handles as a batch."""

    batch: Batch
    micro: Microbatch
    last: bool
    """Whether the optimizer steps after this microbatch."""


class Parts:
    """The model, its optimizer and schedule, and each step's forward, loss and clipping.

    The model is what `parallelize` returns; Lightning adds DDP.
    """

    train_state: TrainState

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        task, plan, world = setup.task, setup.plan, setup.world
        self.model = parallelize(task, plan, world, setup.weights, blocks=setup.blocks.names)
        named = trained_parameters(self.model)
        parameters = [parameter for _, parameter in named]
        self.optimizer = optimizer_of(task, named)
        setup.observers.optimizer(self.optimizer, named)
        self.schedule = schedule_of(task, self.optimizer, setup.total_steps)
        loss_scale = LossScale(plan.precision)
        self.train_state = ModelState(
            model=self.model, optimizer=self.optimizer, schedule=self.schedule, world=world, loss_scale=loss_scale
        )
        self._clip = clipping(task, plan, loss_scale, parameters, functools.partial(gradient_norm, parameters))
        self._switch = reduction_switch(self.model, plan) if plan.uses_fsdp else None
        # Lightning divides by the microbatches, and DDP by the processes where FSDP2 is made to sum.
        summed = plan.uses_fsdp or world.data_group is None
        divisor = float(plan.microbatches * (1 if summed else world.data_size))
        # The context of Lightning's precision is around the loss.
        self._prepare(functools.partial(task.forward, self.model), divisor, loss_scale=loss_scale)

    def _prepare(self, forward: Callable[[Any], Any], divisor: float, **options: Any) -> None:
        """Makes what runs microbatches.

        Args:
            divisor: the number by which Lightning and its strategy divide the gradients afterwards.
            options: further ones of MicrobatchRunner.
        """
        setup, self.forward = self.setup, forward
        self._runner = MicrobatchRunner(
            setup,
            self.model,
            forward,
            gradient_divisor=divisor,
            reduction=loss_reduction(setup.world, summed_in=stored_in(setup.plan)),
            **options,
        )
        self._after_step = AfterStep(setup, self.model) if overrides(setup.task, "after_step") else None
        self._inside = contextlib.ExitStack()
        self._norm: Tensor | None = None
        self._lr = 0.0
        self.skipped = False
        """Whether the step makes no update: its fp16 gradient has an infinity."""

    def begin(self, item: Item) -> None:
        """Begins an item."""
        if item.micro is item.batch.microbatches[0]:
            self._runner.begin(item.batch)
        if self._switch is not None:
            self._switch(item.last)
        self._inside.enter_context(self._runner.padding_ignored(item.micro))
        self._inside.enter_context(draws(self.setup, item.batch, item.micro))

    def loss(self, item: Item) -> Tensor:
        """Computes the item's part of the step's loss, times the gradient divisor; a scalar, as Lightning takes."""
        return self._runner.loss(item.batch, item.micro)[0].scalar()

    def clip(self) -> None:
        """Clips the gradients, between the step's last backward and its update."""
        self._inside.close()
        self.setup.observers.phase(UPDATE)
        self._lr = self.optimizer.param_groups[0]["lr"]
        self._norm, self.skipped = (None, False) if self._clip is None else self._clip()

    def norm(self) -> Tensor | None:
        """Returns the gradient's norm after the update, if it is known."""
        return self._norm

    def end(self, item: Item) -> StepResult | None:
        """Ends an item; returns the step's result after the step's last item."""
        self._inside.close()
        if not item.last:
            return None
        norm = self.norm()
        if not self.skipped and self._after_step is not None:
            self._after_step(item.batch.step)
        return StepResult(batch=item.batch, sums=self._runner.sums(), norm=norm, skipped=self.skipped, lr=self._lr)

    def training(self) -> contextlib.AbstractContextManager[Any]:
        """Context of all steps."""
        return contextlib.nullcontext()

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """Does the same as Engine.evaluate."""
        return evaluate(self.model, self.setup, batches, samples)

    def remarks(self) -> Sequence[str]:
        """Does the same as Engine.remarks."""
        return ()

    def close(self) -> None:
        """Does the same as Engine.close."""
