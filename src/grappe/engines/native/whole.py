"""The native engine's strategy for a model that each process runs from end to end, sharded or not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe.data.batch import Batch, Microbatch
from grappe.data.rand_like import entering
from grappe.engines.base import EngineSetup
from grappe.engines.shared.evaluation import evaluate
from grappe.engines.shared.first_pass import first_pass
from grappe.engines.shared.state import ModelState, trained_parameters
from grappe.parallel.batchnorm import buffers_restored, ignoring_padding
from grappe.parallel.compile import replaying
from grappe.parallel.parallelize import parallelize
from grappe.parallel.replicate import Replicas, uses_replicas
from grappe.parallel.shard import reduction_switch
from grappe.profiling.phases import FORWARD
from grappe.step.clip import gradient_norm
from grappe.step.fast_paths import backward, seed_dropout
from grappe.step.precision import LossScale, autocast
from grappe.step.reduction import NO_ROOTS, Roots, Sums, loss_reduction
from grappe.step.scores import Scores
from grappe.step.task_contract import optimizer_of
from grappe.step.whole_batch_loss import make_losses

_NOTHING: Any = contextlib.nullcontext()


class WholeModel:
    """The task's model under the plan, with all its modules on this process."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self.module = parallelize(setup.task, setup.plan, setup.world, setup.weights)
        self.named = trained_parameters(self.module)

    def make_optimizer(self) -> Optimizer:
        """Makes the task's optimizer over this process's parameters."""
        return optimizer_of(self._setup.task, self.named)

    def train_state(
        self, optimizer: Optimizer, schedule: LRScheduler | None, loss_scale: LossScale
    ) -> ModelState:
        """Returns the model's TrainState."""
        return ModelState(
            model=self.module,
            optimizer=optimizer,
            schedule=schedule,
            world=self._setup.world,
            loss_scale=loss_scale,
        )

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """Computes the scores over all data slices. Collective."""
        return evaluate(self.module, self._setup, batches, samples)


class ForwardBackward:
    """Runs forward and backward of a microbatch, which adds its gradient to the parameters' gradients.

    Args:
        forward: the function that is called with the inputs, if it is not the model itself.
        gradient_divisor: the number by which the gradients are divided afterwards.
    """

    def __init__(
        self,
        setup: EngineSetup,
        model: nn.Module,
        loss_scale: LossScale,
        forward: Callable[[Any], Any] | None = None,
        gradient_divisor: float = 1.0,
    ) -> None:
        self._model = model
        forward = forward or functools.partial(setup.task.forward, model)
        self._forward = replaying(forward, setup.plan, keeps=setup.observers.output is not None)
        self._on_phase, self._stop_requested = setup.observers.phase, setup.stop_requested
        self._autocast = autocast(setup.plan.precision, setup.world.device)
        self._setup = setup
        self._losses = make_losses(setup.task, setup.plan, setup.world, setup.observers)
        self._loss_scale, self._gradient_divisor = loss_scale, gradient_divisor

    def __call__(
        self,
        batch: Batch,
        micro: Microbatch,
        before: Tensor | None = None,
        start: Callable[[Tensor, float], Roots] | None = None,
    ) -> Tensor:
        """Returns the sum of the losses, `before` included.

        Args:
            start: starts the reduction of that sum, before backward.
        """
        self._on_phase(FORWARD)
        scale = self._gradient_divisor * self._loss_scale.value
        # Around backward too, where activation checkpointing runs the forward again.
        with _NOTHING if micro.rows else ignoring_padding(self._model):
            with self._autocast:
                values, gradient, total = self._losses(self._forward(entering(micro)), micro, batch, scale)
            if before is not None:
                total = before + total
            roots, gradients = NO_ROOTS if start is None else start(total, self._stop_requested())
            backward((values, *roots), (gradient, *gradients))
        return total

    def first_pass(self, batch: Batch, forward: Callable[[int, Microbatch], Any] | None = None) -> None:
        """Runs `shared.first_pass`; `forward` is called with each microbatch and its number. Collective."""
        scale = self._gradient_divisor * self._loss_scale.value
        with self._autocast:
            first_pass(self._losses, self._setup, self._model, batch, forward or self._plain, scale)

    def _plain(self, number: int, micro: Microbatch) -> Any:
        return self._forward(entering(micro))

    def dry_run(self, batch: Batch, forward: Callable[[Any], Any], roots: Roots) -> None:
        """Runs a forward and backward of the first microbatch that changes only gradients."""
        micro = batch.microbatches[0]
        with buffers_restored(self._model):
            with self._autocast:
                loss = self._losses.dry_run(forward(entering(micro)), micro, batch)
            torch.autograd.backward((loss.values, *roots[0]), (loss.output_gradient, *roots[1]))


class WholeGradients:
    """Strategy with gradient accumulation: sums the microbatches' gradients, and reduces them over the processes."""

    def __init__(self, setup: EngineSetup, model: WholeModel, loss_scale: LossScale) -> None:
        self._seed, self._world = setup.task.seed, setup.world
        self._parameters = [parameter for _, parameter in model.named]
        self._whole_batch = setup.task.whole_batch_loss
        self._reduction = loss_reduction(setup.world)
        self._switch = reduction_switch(model.module, setup.plan)
        self._unwrapped: Replicas | None = None
        divisor = 1.0
        if uses_replicas(setup.plan, setup.world):
            self._unwrapped = Replicas(model.module, setup.world, setup.task.forward)
            divisor = float(setup.world.data_size)  # DDP averages where FSDP2 is made to sum
            if setup.plan.microbatches > 1:
                self._switch = self._unwrapped.reduce_in_next_backward
        self._forward_backward = ForwardBackward(setup, model.module, loss_scale, self._unwrapped, divisor)

    def gradients(self, batch: Batch) -> Sums:
        """Leaves the global batch's gradient on each parameter; returns the step's (pending) sums. Collective."""
        if self._unwrapped is not None:
            dry_run = functools.partial(self._forward_backward.dry_run, batch)
            self._reduction = self._unwrapped.wrap(dry_run)
            self._unwrapped = None
        seed_dropout(self._seed, batch.step, self._world)
        if self._whole_batch:
            self._forward_backward.first_pass(batch)
        *others, last = batch.microbatches
        total: Tensor | None = None
        for micro in others:
            if self._switch is not None:
                self._switch(False)
            total = self._forward_backward(batch, micro, total)
        if self._switch is not None:
            self._switch(True)
        self._forward_backward(batch, last, total, self._reduction.start)
        return self._reduction.sums()

    def norm(self) -> Tensor:
        """Computes the 2-norm of the whole gradient. Collective if parameters are sharded."""
        return gradient_norm(self._parameters)
