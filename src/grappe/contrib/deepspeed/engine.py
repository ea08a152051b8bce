"""The DeepSpeed engine: ZeRO 0 to 3 and offload to host memory or a disk, every plan key with its usual meaning."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from grappe.contrib.deepspeed import library, settings
from grappe.contrib.deepspeed.model import DeepSpeedModel, explained
from grappe.data.batch import Batch
from grappe.engines.base import COMMON, Engine, EngineSetup, ModelMemory
from grappe.engines.shared.after_step import AfterStep
from grappe.engines.shared.microbatch import NOT_SCALED, MicrobatchRunner
from grappe.errors import DivergedError
from grappe.parallel.parallelize import KEYS
from grappe.plan import Plan
from grappe.profiling.phases import UPDATE
from grappe.step.clip import clipping, gradient_norm, needs_norm
from grappe.step.loss import Loss, Roots, StepResult, loss_reduction
from grappe.step.precision import LossScale, autocast, set_gpu_arithmetic
from grappe.step.scores import Scores
from grappe.task import overrides


class DeepSpeed(Engine):
    """Trains the task's model and optimizer in DeepSpeed's engine; the loss is divided once, by the global count."""

    supported_keys = (COMMON | KEYS | {"config"}) - {"tensor", "channels_last", "compile"}
    about = "DeepSpeed's ZeRO 0-3, with offload to host memory or to a disk"

    @classmethod
    def unsupported_reason(cls, plan: Plan) -> str | None:
        if plan.precision == "fp64":
            return "DeepSpeed keeps the weights that its optimizers step in fp32: use engine=native for precision=fp64"
        if plan.replicate > 1 and plan.shard > 1:
            return (
                f"engine=deepspeed splits over all processes or over none: use shard={plan.processes} (ZeRO), "
                f"replicate={plan.processes}, or engine=native, which has both at once"
            )
        if plan.offload != "none" and plan.replicate > 1:
            return (
                f"engine=deepspeed offloads only sharded state: use shard={plan.replicate} with offload={plan.offload}"
            )
        if plan.offload.startswith(settings.NVME) and plan.zero < 3:
            return f"engine=deepspeed uses a disk under zero=3 alone: leave zero={plan.zero} out, or use offload=cpu"
        if not library.installed():
            return library.INSTALL
        settings.allowed(plan, None)
        return library.problem(settings.nvme_folder(plan)) if plan.offload.startswith(settings.NVME) else None

    @classmethod
    def offloaded_to_disk(cls, plan: Plan, needs: ModelMemory) -> tuple[str, float] | None:
        other = dataclasses.replace(plan, engine="deepspeed", zero=3, offload="none")
        if (
            plan.offload.startswith(settings.NVME)
            or not library.installed()
            or plan.replicate > 1
            or other.changed_keys() - {"engine"} - cls.supported_keys
        ):
            return None
        return f"{other},{library.TO_BE_NAMED}", library.memory_needed(other, needs)

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        set_gpu_arithmetic(setup.plan.precision)
        self._loss_scale = LossScale(setup.plan.precision)
        self._held = held = DeepSpeedModel(setup, self._loss_scale)
        self.train_state = held.train_state
        self._group = held.optimizer.param_groups[0]
        self._runner = MicrobatchRunner(
            setup,
            held.module,
            held.engine,
            # ZeRO scales the loss itself.
            loss_scale=NOT_SCALED if held.stage else self._loss_scale,
            gradient_divisor=float(setup.world.data_size),  # DeepSpeed averages over processes
            precision=autocast(setup.plan.precision, setup.world.device),
            reduction=loss_reduction(setup.world),
            first_forward=held.forward,
        )
        self._update = self._update_partitioned if held.stage else self._update_whole
        parameters = [parameter for _, parameter in held.named]
        self._after_step = AfterStep(setup, held.module) if overrides(setup.task, "after_step") else None
        norm = functools.partial(gradient_norm, parameters)
        self._clip = clipping(setup.task, setup.plan, self._loss_scale, parameters, norm)

    def remarks(self) -> Sequence[str]:
        return (self._held.remark,)

    def step(self, batch: Batch) -> StepResult:
        held, setup = self._held, self._setup
        if held.stage and self._loss_scale.is_dynamic:
            held.engine.optimizer.override_loss_scale(self._loss_scale.value)
        last = batch.microbatches[-1]
        with library.linear(zero3=held.stage == 3), explained():
            self._runner.begin(batch)
            for micro in batch.microbatches:
                held.engine.set_gradient_accumulation_boundary(micro is last)
                self._runner.run(batch, micro, self._backward)
        held.reached.check()
        sums = self._runner.sums()
        lr = self._group["lr"]
        setup.observers.phase(UPDATE)
        norm, skipped = self._update()
        if not skipped and held.schedule is not None:
            held.schedule.step()
        if not skipped and self._after_step is not None:
            self._after_step(batch.step)
        return StepResult(batch=batch, sums=sums, norm=norm, skipped=skipped, lr=lr)

    def _backward(self, loss: Loss, roots: Roots) -> None:
        self._held.engine.backward(loss.scalar(), scale_wrt_gas=False)  # DeepSpeed takes a scalar only

    def _update_partitioned(self) -> tuple[Tensor | None, bool]:
        """Updates with ZeRO's own clipping and its own check for infinities, whose result all processes share."""
        engine, task, plan = self._held.engine, self._setup.task, self._setup.plan
        engine.step()
        applied = engine.was_step_applied()
        if not applied and plan.precision != "fp16":
            # It skips the step in any precision, and training would stop without a message.
            raise DivergedError(
                "the gradient is not finite, though the loss may be. No checkpoint was overwritten: the last one is "
                "from an earlier step. Try a lower lr, and look for square roots, logarithms and divisions at 0 in "
                "the loss"
            )
        self._loss_scale.update(not applied)
        if not needs_norm(task, plan):
            return None, False
        return torch.as_tensor(engine.get_global_grad_norm(), device=self._setup.world.device), not applied

    def _update_whole(self) -> tuple[Tensor | None, bool]:
        """Updates without ZeRO: the gradients are on the parameters, and are clipped as on every other engine."""
        norm, skipped = self._clip() if self._clip is not None else (None, False)
        if skipped:
            self._held.engine.zero_grad()
        else:
            self._held.engine.step()
        return norm, skipped

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        return self._held.evaluate(batches, samples)

    def close(self) -> None:
        del self.train_state, self._update, self._clip, self._after_step
        self._held.close()


ENGINE = DeepSpeed
