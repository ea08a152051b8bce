"""Offloaded: a training's parts under Lightning when DeepSpeed's stage 3 offloads parameters and optimizer state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from grappe.contrib.deepspeed import library
from grappe.contrib.deepspeed.engine import DeepSpeed
from grappe.contrib.deepspeed.model import DeepSpeedModel, explained
from grappe.contrib.lightning.steps import LightningSteps, Parts
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
        plan, world = setup.plan, setup.world
        self._held = held = DeepSpeedModel(setup, LossScale(plan.precision))
        self.train_state = held.train_state

        def checked_norm() -> Tensor | None:
            held.reached.check()
            if setup.task.clip is None:
                return None
            return torch.as_tensor(held.engine.get_global_grad_norm(), device=world.device)

        self.steps = LightningSteps(
            setup,
            model=held.module,
            forward=held.engine,
            optimizer=held.optimizer,
            schedule=held.schedule,
            # DeepSpeed averages over processes; Lightning divides by the microbatches, and so does DeepSpeed.
            gradient_divisor=float(world.data_size * plan.microbatches**2),
            switch=held.engine.set_gradient_accumulation_boundary,
            loss_context=autocast(plan.precision, world.device),
            clip=lambda: (None, False),  # DeepSpeed clips when it steps
            after_update=checked_norm,
        )

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
        del self.train_state, self.steps
        self._held.close()
