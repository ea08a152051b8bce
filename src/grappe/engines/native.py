"""The native engine: one process, DDP, FSDP2, tensor parallelism and their products, on torch alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grappe import evaluation, model_state
from grappe.data.batch import Batch, Microbatch
from grappe.data.feed import rows_of
from grappe.engines.base import COMMON, Engine, Saved, Setting, State, Stepper
from grappe.loop import StepResult
from grappe.losses import Losses
from grappe.phases import FORWARD, UPDATE
from grappe.pipeline import rules
from grappe.plan import Plan
from grappe.prepare import Prepared, prepare
from grappe.prepare.backward import backward
from grappe.prepare.batchnorm import unnoticed, untraced
from grappe.prepare.clip import bounding, exact_norm, gradient_norm, scale
from grappe.prepare.dropout import seed_dropout
from grappe.prepare.exact import Exact, refusal
from grappe.prepare.exact_shard import ShardedExact
from grappe.prepare.precision import LossScale, set_tf32
from grappe.prepare.shard import reshard, uses_shard
from grappe.prepare.tally import NO_ROOTS, Roots, Sums
from grappe.prepare.update import Update
from grappe.scores import Scores


class Native(Stepper):
    """Owns the model, the optimizer and the schedule; every degree is a property of the prepared model."""

    axes = COMMON | {
        "replicate", "shard", "zero", "pipeline", "schedule", "stages", "tensor", "microbatches", "precision",
        "batchnorm", "channels_last", "recompute", "compile", "offload", "exact",
    }  # fmt: skip
    about = "torch's own: DDP, FSDP2 (ZeRO 1-3), pipelines, tensor parallelism and their products"

    @classmethod
    def fitting(cls, plan: Plan) -> type[Engine]:
        if plan.pipeline == 1:
            return cls
        from grappe.engines.pipeline import Pipelined

        return Pipelined

    @classmethod
    def refuse(cls, plan: Plan) -> str | None:
        if plan.offload.startswith("nvme:"):
            return (
                "engine=native offloads to the CPU only: use offload=cpu, or an engine with offload to disk"
            )
        if plan.tensor > 1 and plan.batchnorm == "sync":
            return "batchnorm=sync with tensor parallelism is not supported: use batchnorm=local"
        return refusal(plan) or rules.refuse(plan)

    def __init__(self, setting: Setting) -> None:
        self._task, self._plan, self._world = setting.task, setting.plan, setting.world
        self._flag, self._phase = setting.flag, setting.phase
        set_tf32(self._plan.precision)
        self._prepared = self._prepare(setting)
        self._begin, self._tally = self._prepared.begin, self._prepared.tally
        self._model = self._prepared.model
        self._autocast = self._prepared.autocast or _PLAIN
        self._losses = Losses(self._task)
        self._scale = LossScale(self._plan.precision)
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._optimizer = self._make_optimizer(named)
        self._schedule = self._task.schedule(self._optimizer, setting.total_steps)
        self._step_optimizer = Update(self._optimizer)
        self._group = self._optimizer.param_groups[0]
        self._exact = self._make_exact()
        # DDP averages where FSDP2 is told to sum.
        summed = uses_shard(self._plan) or self._world.data_group is None or self._plan.exact
        self._ways = 1.0 if summed else float(self._world.data_size)
        self._needs_norm = self._task.clip is not None or self._plan.precision == "fp16"
        self._model.train()

    def _prepare(self, setting: Setting) -> Prepared:
        return prepare(self._task, self._plan, self._world, setting.weights)

    def _make_exact(self) -> Exact | None:
        if not self._plan.exact:
            return None
        kind = ShardedExact if uses_shard(self._plan) else Exact
        return kind(self._model, self._parameters, self._plan, self._world)

    def _make_optimizer(self, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        return self._task.optimizer(named)

    def step(self, batch: Batch) -> StepResult:
        sums = self._gradients(batch) if self._exact is None else self._exact_gradients(batch, self._exact)
        lr = self._group["lr"]
        norm, skipped = self._update()
        return StepResult(batch, sums, norm, skipped, lr)

    def _gradients(self, batch: Batch) -> Sums:
        """Every microbatch's, added up as they come, and over the processes; the step's sums, on their way."""
        if self._begin is not None:
            self._tally = self._begin(functools.partial(self._rehearse, batch.microbatches[0]))
            self._begin = None
        seed_dropout(self._task.seed, batch.step, self._world)
        total: Tensor | None = None
        last = batch.microbatches[-1]
        for micro in batch.microbatches:
            if micro is not batch.microbatches[0]:
                self._phase(FORWARD)
            if self._prepared.synchronise is not None:
                self._prepared.synchronise(micro is last)
            total = self._accumulate(batch, micro, total, micro is last)
        return self._tally.sums()

    def _exact_gradients(self, batch: Batch, exact: Exact) -> Sums:
        """Every piece's, added up in one order whatever the number of processes."""
        for index, micro in enumerate(batch.microbatches):
            total = None
            if index:
                self._phase(FORWARD)
            if micro.rows or exact.every_piece:
                with exact.piece(index, batch.step, self._task.seed):
                    total = self._accumulate(batch, micro, None, False)
            exact.add(total)
        return exact.reduce(self._flag(), batch.samples)

    def _accumulate(self, batch: Batch, micro: Microbatch, before: Tensor | None, last: bool) -> Tensor:
        """Forward and backward of a microbatch; the sum of losses so far."""
        # Around backward too, where recomputation runs the forward again.
        with _PLAIN if micro.rows else unnoticed(self._model, self._prepared.rows):
            with self._autocast:
                output = self._prepared.forward(micro.inputs)
                rows = micro.rows or rows_of(micro.targets)
                values = self._losses.values(output, micro, rows)
            seed = self._losses.seed(values, micro, batch, rows, self._ways * self._scale.value)
            total = self._losses.total(values, micro, rows)
            total = total if before is None else before + total
            roots, gradients = self._tally.roots(total, self._flag()) if last else NO_ROOTS
            backward((values, *roots), (seed, *gradients))
        return total

    def _rehearse(self, micro: Microbatch, forward: Callable[[Any], Any], roots: Roots) -> None:
        """A forward and backward that leaves nothing behind but gradients."""
        with untraced(self._model):
            with self._autocast:
                values = self._losses.values(forward(micro.inputs), micro, rows_of(micro.targets))
            torch.autograd.backward((values.sum(), *roots[0]), (None, *roots[1]))

    def _update(self) -> tuple[Tensor | None, bool]:
        self._phase(UPDATE)  # clipping belongs to it
        norm, skipped = None, False
        if self._needs_norm:
            norm, skipped = self._clip()
        if not skipped:
            self._step_optimizer()
            if self._schedule is not None:
                self._schedule.step()
        self._scale.update(skipped)
        # As optimizer.zero_grad(), less the 8 microseconds that its profiling takes.
        for parameter in self._parameters:
            parameter.grad = None
        return norm, skipped

    def _clip(self) -> tuple[Tensor, bool]:
        norm = self._norm() / self._scale.value
        factor = 1 / self._scale.value
        if self._plan.precision == "fp16" and not torch.isfinite(norm):
            return norm, True
        if self._task.clip is not None:
            scale(self._parameters, bounding(norm, self._task.clip) * factor)
        elif factor != 1:
            scale(self._parameters, factor)
        return norm, False

    def _norm(self) -> Tensor:
        return gradient_norm(self._parameters) if self._exact is None else exact_norm(self._parameters)

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        scarce = self._plan.saves_memory
        scores = evaluation.evaluate(
            self._model, self._task, self._world, batches, samples, self._autocast, scarce=scarce
        )
        reshard(self._model)
        return scores

    def state(self) -> State:
        tensors, own, values = model_state.save(self._model, self._optimizer, self._schedule, self._world)
        return State(tensors=tensors, own=own, values={**values, "scale": self._scale.state()})

    def restore(self, saved: Saved) -> None:
        model_state.restore(self._model, self._optimizer, self._schedule, self._world, saved)
        self._scale.restore(saved.values.get("scale", {}))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        return model_state.export(self._model, self._world)

    def close(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)


_PLAIN: Any = contextlib.nullcontext()
ENGINE = Native
