"""Offloaded: a training's parts under Lightning when DeepSpeed's stage 3 offloads parameters and optimizer state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from grappe.contrib.deepspeed import library
from grappe.contrib.deepspeed.engine import DeepSpeed
from grappe.contrib.deepspeed.model import DeepSpeedModel, explained
from grappe.contrib.lightning.steps import Parts
from grappe.data.batch import Batch
from grappe.engines.base import EngineSetup
from grappe.plan import Plan
from grappe.step.precision import LossScale, autocast
from grappe.step.scores import Scores


def unsupported_reason(plan: Plan) -> str | None:
    """Returns the reason why DeepSpeed cannot offload this plan under Lightning; None: no reason. Pure."""
    for key in ("tensor", "compile", "channels_last"):
        if key in plan.changed_keys():
            return f"engine=lightning offloads by DeepSpeed, which has no {key}: leave it out"
    if plan.precision == "fp16":
        return (
            "engine=lightning has no fp16 with offload: its Trainer moves the schedule on in a step that DeepSpeed "
            "skips. Use precision=bf16, or engine=deepspeed"
        )
    if plan.replicate > 1 or plan.zero != 3:
        return (
            "engine=lightning offloads by DeepSpeed's stage 3, over all processes: "
            f"use shard={plan.data_parallel} with offload={plan.offload}"
        )
    return DeepSpeed.unsupported_reason(plan)


class Offloaded(Parts):
    """The parts of the deepspeed engine (model, state, evaluation) in Lightning's loop."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup, plan, world = setup, setup.plan, setup.world
        self._held = held = DeepSpeedModel(setup, LossScale(plan.precision))
        self.train_state, self.model = held.train_state, held.module
        self.optimizer, self.schedule = held.optimizer, held.schedule
        self._clip = None  # DeepSpeed clips when it steps
        self._switch = held.engine.set_gradient_accumulation_boundary
        # DeepSpeed averages over processes; Lightning divides by the microbatches, and so does DeepSpeed.
        divisor = float(world.data_size * plan.microbatches**2)
        self._prepare(held.engine, divisor, precision=autocast(plan.precision, world.device))

    def norm(self) -> Tensor | None:
        self._held.reached.check()
        if self.setup.task.clip is None:
            return None
        return torch.as_tensor(self._held.engine.get_global_grad_norm(), device=self.setup.world.device)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context of all steps: ZeRO 3's linear function, and errors explained for the user."""
        with library.linear(zero3=True), explained():
            yield

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        return self._held.evaluate(batches, samples)

    def remarks(self) -> Sequence[str]:
        return (self._held.remark,)

    def close(self) -> None:
        held = self._held
        vars(self).clear()  # which refers to what `held` frees
        held.close()
