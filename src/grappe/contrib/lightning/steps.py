"""The parts of a step that Lightning's hooks call, and the parts for a model under torch's own parallelism."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe.data.batch import Batch, Microbatch, stored_in
from grappe.engines.base import EngineSetup
from grappe.engines.shared.after_step import AfterStep
from grappe.engines.shared.microbatch import NOT_SCALED, MicrobatchRunner, draws, evaluate
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


class LightningSteps:
    """The forward, the loss and the clipping of each step.

    Args:
        forward: the function that is called with a microbatch's inputs.
        gradient_divisor: the number by which Lightning and its strategy divide the gradients afterwards.
        switch: callback before each item, with whether it is the step's last item.
        loss_context: the context in which the loss runs.
        loss_scale: the factor of the loss, where this engine scales it.
        clip: callback between the step's last backward and its update; returns the gradient's norm, if known, and
            whether to skip the update.
        after_update: callback after the update; returns the gradient's norm, if known.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        model: nn.Module,
        forward: Callable[[Any], Any],
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        gradient_divisor: float,
        switch: Callable[[bool], None] | None,
        loss_context: contextlib.AbstractContextManager[Any],
        loss_scale: LossScale = NOT_SCALED,
        clip: Callable[[], tuple[Tensor | None, bool]],
        after_update: Callable[[], Tensor | None],
    ) -> None:
        self.setup, self.model, self.optimizer, self.schedule = setup, model, optimizer, schedule
        self.forward, self._switch = forward, switch
        self._clip, self._after_update = clip, after_update
        self._after_step = AfterStep(setup, model) if overrides(setup.task, "after_step") else None
        self._runner = MicrobatchRunner(
            setup,
            model,
            forward,
            loss_scale=loss_scale,
            gradient_divisor=gradient_divisor,
            precision=loss_context,
            reduction=loss_reduction(setup.world, summed_in=stored_in(setup.plan)),
        )
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
        self._norm, self.skipped = self._clip()

    def end(self, item: Item) -> StepResult | None:
        """Ends an item; returns the step's result after the step's last item."""
        self._inside.close()
        if not item.last:
            return None
        norm = self._after_update()
        if not self.skipped and self._after_step is not None:
            self._after_step(item.batch.step)
        return StepResult(
            batch=item.batch,
            sums=self._runner.sums(),
            norm=self._norm if norm is None else norm,
            skipped=self.skipped,
            lr=self._lr,
        )


class Parts:
    """The parts of a training that a Trainer runs, for the model that `parallelize` returns; Lightning adds DDP."""

    steps: LightningSteps
    train_state: TrainState

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        task, plan, world = setup.task, setup.plan, setup.world
        model = parallelize(task, plan, world, setup.weights, blocks=setup.blocks.names)
        named = trained_parameters(model)
        parameters = [parameter for _, parameter in named]
        optimizer = optimizer_of(task, named)
        setup.observers.optimizer(optimizer, named)
        schedule = schedule_of(task, optimizer, setup.total_steps)
        loss_scale = LossScale(plan.precision)
        self.train_state = ModelState(
            model=model, optimizer=optimizer, schedule=schedule, world=world, loss_scale=loss_scale
        )
        norm = functools.partial(gradient_norm, parameters)
        clip = clipping(task, plan, loss_scale, parameters, norm)
        # Lightning divides by the microbatches, and DDP by the processes where FSDP2 is made to sum.
        summed = plan.uses_fsdp or world.data_group is None
        self.steps = LightningSteps(
            setup,
            model=model,
            forward=functools.partial(task.forward, model),
            optimizer=optimizer,
            schedule=schedule,
            gradient_divisor=float(plan.microbatches * (1 if summed else world.data_size)),
            switch=reduction_switch(model, plan) if plan.uses_fsdp else None,
            loss_context=contextlib.nullcontext(),  # Lightning's own is around it
            loss_scale=loss_scale,
            clip=lambda: (None, False) if clip is None else clip(),
            after_update=lambda: None,
        )

    def training(self) -> contextlib.AbstractContextManager[Any]:
        """Context of all steps."""
        return contextlib.nullcontext()

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """Does the same as Engine.evaluate."""
        return evaluate(self.steps.model, self._setup, batches, samples)

    def remarks(self) -> Sequence[str]:
        """Does the same as Engine.remarks."""
        return ()

    def close(self) -> None:
        """Does the same as Engine.close."""
