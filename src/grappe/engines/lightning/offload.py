"""Lightning with offload: its DeepSpeed strategy, of stage 3, over the deepspeed engine's own parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from grappe.data.batch import Batch
from grappe.engines.base import Saved, Setting, State
from grappe.engines.deepspeed import DeepSpeed, library
from grappe.engines.deepspeed.reached import said_plainly
from grappe.engines.lightning import Item, Lightning
from grappe.loop import After, StepResult
from grappe.phases import UPDATE
from grappe.plan import Plan
from grappe.scores import Scores


class Offloaded(Lightning):
    """The model, its state and its evaluation are the deepspeed engine's; the loop is Lightning's."""

    @classmethod
    def refuse(cls, plan: Plan) -> str | None:
        for key in ("tensor", "compile", "channels_last"):
            if key in plan.asked():
                return f"engine=lightning offloads by DeepSpeed, which has no {key}: leave it out"
        if plan.replicate > 1 or plan.zero != 3:
            return (
                "engine=lightning offloads by DeepSpeed's stage 3, over all processes: "
                f"use shard={plan.data_parallel} with offload={plan.offload}"
            )
        return DeepSpeed.refuse(plan)

    def __init__(self, setting: Setting) -> None:
        self.task, self.plan, self.world = setting.task, setting.plan, setting.world
        self.total_steps = setting.total_steps
        self._flag, self._phase = setting.flag, setting.phase
        self.held = held = DeepSpeed(setting)
        self.model, self._forward = held._model, held._engine
        self._rows, self._tally, self._losses = held._rows, held._tally, held._losses
        self._synchronise = held._engine.set_gradient_accumulation_boundary
        self.optimizer, self.schedule = held._optimizer, held._schedule
        # Lightning divides by the microbatches, and so does DeepSpeed.
        self._ways = held._ways * self.plan.microbatches**2
        self._begin()
        self._loss_in = held._autocast

    def train(self, batches: Iterator[Batch], after: After) -> None:
        with library.linear(zero3=True), said_plainly():
            super().train(batches, after)

    def clip(self) -> None:
        self._phase(UPDATE)
        self._lr = self.optimizer.param_groups[0]["lr"]  # DeepSpeed clips when it steps

    def end(self, item: Item) -> StepResult | None:
        if item.last:
            self.held._reached.check()
            if self.task.clip is not None:
                norm = self.held._engine.get_global_grad_norm()
                self._norm = torch.as_tensor(norm, device=self.world.device)
        return super().end(item)

    def remarks(self) -> Sequence[str]:
        return self.held.remarks()

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        return self.held.evaluate(batches, samples)

    def state(self) -> State:
        return self.held.state()

    def restore(self, saved: Saved) -> None:
        self.held.restore(saved)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        return self.held.export()

    def close(self) -> None:
        self.held.close()
