"""The Lightning engine: lightning.Trainer runs the loop over the task's own parts; our watchers are its callback."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from grappe import evaluation, model_state
from grappe.data.batch import Batch, Microbatch
from grappe.data.feed import rows_of
from grappe.engines.base import COMMON, Engine, Saved, Setting, State
from grappe.loop import After, StepResult
from grappe.losses import Losses
from grappe.phases import FORWARD, UPDATE
from grappe.plan import Plan
from grappe.prepare import prepare
from grappe.prepare.batchnorm import unnoticed, untraced
from grappe.prepare.clip import bounding, gradient_norm, scale
from grappe.prepare.dropout import seed_dropout
from grappe.prepare.precision import set_tf32
from grappe.prepare.shard import reshard, uses_shard
from grappe.scores import Scores

INSTALL = "engine=lightning needs the package lightning: pip install 'grappe[lightning]'"


class Item(NamedTuple):
    """What Lightning takes for a batch: one microbatch of a step."""

    batch: Batch
    micro: Microbatch
    last: bool
    """Whether the optimizer steps behind it."""


class Lightning(Engine):
    """The parts of one training, and what Lightning's hooks call; `fit.py` puts them into a Trainer."""

    axes = COMMON | {
        "replicate", "shard", "zero", "tensor", "microbatches", "precision", "batchnorm",
        "channels_last", "recompute", "compile", "offload",
    }  # fmt: skip
    about = "lightning.Trainer and its strategies: DDP, FSDP2 with tensor parallelism, DeepSpeed for offload"

    @classmethod
    def refuse(cls, plan: Plan) -> str | None:
        if importlib.util.find_spec("lightning") is None:
            return INSTALL
        if plan.precision == "fp16":
            return (
                "engine=lightning has no fp16: its Trainer moves the schedule on in a step that it skips. "
                "Use precision=bf16, or fp16 with engine=native"
            )
        if plan.offload != "none":
            from grappe.engines.lightning.offload import Offloaded

            return Offloaded.refuse(plan)
        if plan.tensor > 1 and plan.batchnorm == "sync":
            return "batchnorm=sync with tensor parallelism is not supported: use batchnorm=local"
        return None

    @classmethod
    def fitting(cls, plan: Plan) -> type[Engine]:
        if plan.offload == "none":
            return cls
        from grappe.engines.lightning.offload import Offloaded

        return Offloaded

    def __init__(self, setting: Setting) -> None:
        self.task, self.plan, self.world = setting.task, setting.plan, setting.world
        self.total_steps = setting.total_steps
        self._flag, self._phase = setting.flag, setting.phase
        set_tf32(self.plan.precision)
        prepared = prepare(self.task, self.plan, self.world, setting.weights)
        self.model = self._forward = prepared.model
        self._rows, self._tally = prepared.rows, prepared.tally
        self._synchronise = prepared.synchronise if uses_shard(self.plan) else None
        self._evaluated_in = prepared.autocast or contextlib.nullcontext()
        self._losses = Losses(self.task)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self.optimizer = self.task.optimizer(named)
        self.schedule = self.task.schedule(self.optimizer, setting.total_steps)
        # Lightning divides by the microbatches, and DDP by the processes where FSDP2 is told to sum.
        summed = uses_shard(self.plan) or self.world.data_group is None
        self._ways = float(self.plan.microbatches * (1 if summed else self.world.data_size))
        self._begin()
        self.model.train()

    def _begin(self) -> None:
        """Nothing has happened yet."""
        self._around = contextlib.ExitStack()
        self._loss_in: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._total: Tensor | None = None
        self._norm: Tensor | None = None
        self._lr = 0.0

    def train(self, batches: Iterator[Batch], after: After) -> None:
        first = next(batches, None)
        if first is None:
            return
        from grappe.engines.lightning.fit import fit

        fit(self, Item(first, first.microbatches[0], True), itertools.chain((first,), batches), after)

    # ---- what Lightning calls, in this order ---------------------------------------------------------------

    def begin(self, item: Item) -> None:
        """Before an item."""
        if item.micro is item.batch.microbatches[0]:
            seed_dropout(self.task.seed, item.batch.step, self.world)
            self._total = None
        if self._synchronise is not None:
            self._synchronise(item.last)
        if not item.micro.rows:  # until its backward is over, where recomputation runs the forward again
            self._around.enter_context(unnoticed(self.model, self._rows))

    def loss(self, item: Item) -> Tensor:
        """The item's share of the step's loss, times what Lightning and DDP will divide by; a scalar."""
        self._phase(FORWARD)  # its optimizer calls this, which looks like an update from outside
        batch, micro, last = item
        output = self._forward(micro.inputs)
        rows = micro.rows or rows_of(micro.targets)
        with self._loss_in:
            values = self._losses.values(output, micro, rows)
        seed = self._losses.seed(values, micro, batch, rows, self._ways)
        total = self._losses.total(values, micro, rows)
        self._total = total if self._total is None else self._total + total
        if last:
            self._tally.roots(self._total, self._flag())
        # Its gradient with respect to `values` is the seed; Lightning takes a scalar only.
        return (values.float() * seed.float()).sum()

    def clip(self) -> None:
        """Between the step's last backward and its update."""
        self._phase(UPDATE)
        self._lr = self.optimizer.param_groups[0]["lr"]
        if self.task.clip is None:
            return
        self._norm = gradient_norm(self._parameters)
        scale(self._parameters, bounding(self._norm, self.task.clip))

    def end(self, item: Item) -> StepResult | None:
        """Behind an item; what its step did, where it was the last."""
        self._around.close()
        if not item.last:
            return None
        return StepResult(
            batch=item.batch, sums=self._tally.sums(), norm=self._norm, skipped=False, lr=self._lr
        )

    def rehearse(self, item: Item, loss: Callable[[Item], Tensor]) -> bool:
        """A forward and backward that leaves nothing behind; whether every parameter got a gradient. Collective."""
        with untraced(self.model):
            self._total = None
            loss(item).backward()
        self._tally.sums().read()
        reached = all(parameter.grad is not None for parameter in self._parameters)
        for parameter in self._parameters:
            parameter.grad = None
        return all(self.world.gather(reached))

    # ---- what does not depend on who runs the loop -----------------------------------------------------------

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        scores = evaluation.evaluate(
            self.model,
            self.task,
            self.world,
            batches,
            samples,
            self._evaluated_in,
            scarce=self.plan.saves_memory,
        )
        reshard(self.model)
        return scores

    def state(self) -> State:
        tensors, own, values = model_state.save(self.model, self.optimizer, self.schedule, self.world)
        return State(tensors=tensors, own=own, values=values)

    def restore(self, saved: Saved) -> None:
        model_state.restore(self.model, self.optimizer, self.schedule, self.world, saved)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        return model_state.export(self.model, self.world)

    def close(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


ENGINE = Lightning
