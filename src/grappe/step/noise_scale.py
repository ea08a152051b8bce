"""NoiseScale: measures the gradient noise scale, from gradients of slices of a batch that a step computes anyway.

McCandlish et al. (2018), "An empirical model of large-batch training", appendix A.1. Legend: G the gradient of the mean
loss over all data, S the trace of the covariance of one sample's gradient. The gradient g_b over b samples has
E|g_b|^2 = |G|^2 + S / b. A step has it for its slices (the microbatches of this process) and for its batch of B
samples, so that both unknowns follow; S / |G|^2 is a number of samples, the noise scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grappe.data.batch import Microbatch
from grappe.errors import UsageError
from grappe.plan import Plan
from grappe.profiling.phases import UPDATE
from grappe.step.closure import needs_closure
from grappe.task import Task

KEPT = 0.5
"""Factor of the sums at each evaluation: older steps count less, as the scale changes during a training."""


class Noise(NamedTuple):
    """The noise of gradients, in a mean over steps."""

    steps: int
    """So many steps were measured since the last time."""
    variance: float
    """S: the trace of the covariance of one sample's gradient."""
    square: float
    """|G|^2: the square of the 2-norm of the gradient over all data."""

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None: it cannot be distinguished from chance."""
        scale = self.variance / self.square if self.square > 0 and self.variance > 0 else math.nan
        return scale if math.isfinite(scale) else None


def refuse(task: Task, plan: Plan) -> None:
    """Raises UsageError where a step has no gradients of slices."""
    if task.whole_batch_loss:
        raise UsageError("--noise-scale: this task's loss compares samples, so no sample has its own gradient")
    for wrong, why in (
        (plan.engine != "native", f"engine={plan.engine} does not show the gradients of slices: use engine=native"),
        (plan.shard * plan.tensor * plan.pipeline > 1, "a sharded model has no gradients of slices: use replicate"),
        (plan.domain > 1, "domain= has no gradients of slices: leave it out"),
        (bool(plan.exact), "exact sums in its own order: leave it out"),
        (bool(plan.compile), "a compiled backward does not show them: leave compile out"),
        (plan.precision == "fp16", "fp16 scales losses: use precision=bf16"),
    ):
        if wrong:
            raise UsageError(f"--noise-scale: {why}")
    if plan.replicate * plan.microbatches < 2:
        raise UsageError(
            "--noise-scale: a batch in one piece has no slices: give --plan microbatches=2, which changes no result"
        )


class NoiseScale:
    """Adds up the squares of the gradients of this process's slices, and of the whole batch.

    Its callbacks are EngineSetup's. The sums stay on the device until `take`.

    Args:
        data_size: number of processes among which the batch is divided.
        batch_size: samples of a step, over all processes.
        short_step: the step of an epoch, from 0, whose batch is shorter; None: there is none.
        steps_per_epoch: optimizer steps.
        start: steps that were done before.
    """

    def __init__(
        self, *, data_size: int, batch_size: int, short_step: int | None, steps_per_epoch: int, start: int
    ) -> None:
        self._data_size, self._batch_size = data_size, batch_size
        self._short_step, self._steps_per_epoch, self._step = short_step, steps_per_epoch, start
        self._parameters: list[nn.Parameter] = []
        self._rows: list[int] = []
        self._squares: list[Tensor] = []
        self._slice: Tensor | None = None
        self._first = True  # its gradients may include an engine's dry run
        self._sums = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
        """Sums of S, of |G|^2 and of steps, over the steps in which both are numbers."""
        self._kept = (0.0, 0.0, 0.0)

    def on_optimizer(self, optimizer: Optimizer, named: Any) -> None:
        """Listens to the parameters' gradients.

        Raises:
            UsageError: the optimizer computes several gradients a step.
        """
        if needs_closure(optimizer):
            raise UsageError(
                f"--noise-scale: {type(optimizer).__name__} computes several gradients a step: leave it out, or "
                "measure it with torch.optim.SGD"
            )
        self._parameters = [parameter for _, parameter in named]
        for parameter in self._parameters:
            parameter.register_hook(self._add)

    def on_output(self, output: Any, micro: Microbatch, named: Mapping[str, Tensor]) -> None:
        """Begins a slice, whose backward follows."""
        self._end_slice()
        if micro.rows:
            self._rows.append(micro.rows)
            self._slice = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)

    def on_phase(self, phase: int) -> None:
        """Ends a step before its gradients are clipped and used."""
        if phase != UPDATE:
            return
        self._end_slice()
        short = self._step % self._steps_per_epoch == self._short_step
        if self._squares and not self._first and not short:
            self._measure()
        self._first, self._step = False, self._step + 1
        self._rows, self._squares = [], []

    def take(self) -> Noise | None:
        """Returns the noise so far, the newest steps counting most. Waits for the device. None: nothing new."""
        variance, square, steps = (float(total) for total in self._sums)
        if not steps:
            return None
        before = [KEPT * total for total in self._kept]
        self._kept = (before[0] + steps, before[1] + variance, before[2] + square)
        self._sums = [torch.zeros_like(total) for total in self._sums]
        weight, variance, square = self._kept
        return Noise(steps=int(steps), variance=variance / weight, square=square / weight)

    def _add(self, gradient: Tensor) -> None:
        if self._slice is not None:
            self._slice += _square(gradient)

    def _end_slice(self) -> None:
        if self._slice is not None:
            self._squares.append(self._slice)
            self._slice = None

    def _measure(self) -> None:
        """Adds this step's estimates of S and |G|^2; both are unbiased, their ratio is not."""
        batch_size = self._batch_size
        # What backward leaves is divided by the whole batch's count, and multiplied by what DDP divides by.
        scaled = [
            square * (batch_size / (self._data_size * rows)) ** 2
            for rows, square in zip(self._rows, self._squares, strict=True)
        ]
        small = torch.stack(scaled).mean()
        inverse = sum(1.0 / rows for rows in self._rows) / len(self._rows)
        big = torch.stack(
            [_square(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        ).sum()
        variance = (small - big) / (inverse - 1.0 / batch_size)
        square = big - variance / batch_size
        # A step whose gradients overflow has no estimate, and would spoil all later ones.
        finite = torch.isfinite(variance) & torch.isfinite(square)
        terms = (torch.where(finite, term, 0.0) for term in (variance, square, torch.ones_like(small)))
        self._sums = [total.to(small.device) + term for total, term in zip(self._sums, terms, strict=True)]


def _square(gradient: Tensor) -> Tensor:
    """The square of a gradient's 2-norm, a float64 scalar."""
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return torch.linalg.vector_norm(values, dtype=torch.float32).double() ** 2
