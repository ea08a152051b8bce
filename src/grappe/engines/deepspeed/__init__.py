"""The DeepSpeed engine: ZeRO 0 to 3 and offload to host memory or a disk, with what its words mean everywhere here."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grappe import evaluation, model_state
from grappe.data.batch import Batch, Microbatch
from grappe.data.feed import rows_of
from grappe.engines.base import COMMON, Saved, Setting, State, Stepper
from grappe.engines.deepspeed import disk, library, optimizer, settings
from grappe.engines.deepspeed.partition import partitioned
from grappe.engines.deepspeed.reached import Reached, said_plainly
from grappe.engines.deepspeed.state import Partitioned
from grappe.errors import DivergedError
from grappe.loop import StepResult
from grappe.losses import Losses
from grappe.needs import Needs
from grappe.phases import FORWARD, UPDATE
from grappe.plan import Plan
from grappe.prepare.batchnorm import Rows, synchronise_batchnorm, unnoticed
from grappe.prepare.clip import bounding, gradient_norm, scale
from grappe.prepare.dropout import seed_dropout
from grappe.prepare.materialise import fill, on_meta
from grappe.prepare.precision import LossScale, autocast, set_tf32
from grappe.prepare.recompute import recompute_units
from grappe.prepare.tally import ReduceTally, Tally
from grappe.schedule import replay
from grappe.scores import Scores


class DeepSpeed(Stepper):
    """Hands DeepSpeed the task's model and optimizer, and backward a loss that is divided once, by the global count."""

    axes = COMMON | {
        "replicate", "shard", "zero", "microbatches", "precision", "batchnorm", "recompute", "offload", "config",
    }  # fmt: skip
    about = "DeepSpeed's ZeRO 0-3, with offload to host memory or to a disk"

    @classmethod
    def refuse(cls, plan: Plan) -> str | None:
        if plan.replicate > 1 and plan.shard > 1:
            return (
                f"engine=deepspeed splits over all processes or over none: use shard={plan.processes} (ZeRO), "
                f"replicate={plan.processes}, or engine=native, which has both at once"
            )
        if plan.offload != "none" and plan.replicate > 1:
            return f"engine=deepspeed offloads what is split: use shard={plan.replicate} with offload={plan.offload}"
        if plan.offload.startswith(settings.NVME) and plan.zero < 3:
            return f"engine=deepspeed keeps a disk for zero=3: leave zero={plan.zero} out, or use offload=cpu"
        if not library.installed():
            return library.INSTALL
        settings.allowed(plan, None)
        return disk.problem(settings.nvme_folder(plan)) if plan.offload.startswith(settings.NVME) else None

    @classmethod
    def put_away(cls, plan: Plan, needs: Needs) -> tuple[str, float] | None:
        other = dataclasses.replace(plan, engine="deepspeed", zero=3, offload="none")
        if (
            plan.offload.startswith(settings.NVME)
            or not library.installed()
            or plan.replicate > 1
            or other.asked() - {"engine"} - cls.axes
        ):
            return None
        return f"{other},{disk.TO_BE_NAMED}", disk.memory_needed(other, needs)

    def __init__(self, setting: Setting) -> None:
        self._task, self._plan, self._world = setting.task, setting.plan, setting.world
        self._flag, self._phase = setting.flag, setting.phase
        self._stage = settings.stage(self._plan)
        set_tf32(self._plan.precision)
        self._deepspeed = library.load(self._world)
        self._communication = library.Communication(self._world)
        if self._plan.offload != "none":
            library.give_memory_back()
        self._scratch = disk.Scratch(self._plan, self._world)
        self._autocast = self._precision()
        with library.linear(zero3=False):
            self._model, said = self._make_model(setting)
            # A context of its own: evaluation is inside the other already, and neither may be entered twice.
            self._carrier = _Carrier(self._model, self._precision())
            self._initialize(said, setting.total_steps)
        self._losses = Losses(self._task)
        self._scale = LossScale(self._plan.precision)
        self._tally = ReduceTally(self._world) if self._world.size > 1 else Tally(self._world.device)
        self._ways = float(self._world.data_size)  # DeepSpeed averages over processes
        self._needs_norm = self._task.clip is not None or self._plan.precision == "fp16"
        self._carrier.train()

    def _precision(self) -> Any:
        return autocast(self._plan.precision, self._world.device) or contextlib.nullcontext()

    def _make_model(self, setting: Setting) -> tuple[nn.Module, settings.Settings]:
        """The model with its values, split where ZeRO 3 is asked for, and DeepSpeed's settings."""
        model = on_meta(self._task)
        sizes = [parameter.numel() for parameter in model.parameters()]
        cuda = self._world.device.type == "cuda"
        said = settings.settings(self._plan, self._task, sum(sizes), max(sizes, default=1), cuda)
        self._scratch.make(sum(sizes), said)
        if self._plan.recompute:
            recompute_units(list(self._task.units(model)) or [model])
        if self._stage == 3:
            partitioned(model, setting.weights, self._world.device, said)
        else:
            fill(model, setting.weights, self._world.device)
        self._rows = None
        if self._plan.batchnorm == "sync" and self._world.data_group is not None:
            self._rows = Rows()
            synchronise_batchnorm(model, self._world.data_group, self._rows)
        return model, said

    def _initialize(self, said: settings.Settings, total_steps: int) -> None:
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._reached = Reached(self._model, self._stage, self._world)
        given = self._task.optimizer(named)
        optimizer.check_elementwise(given, self._stage)
        self._optimizer, words = optimizer.chosen(given, self._plan, self._world)
        self._words = f"DeepSpeed {self._deepspeed.__version__}, ZeRO {self._stage}, {words}"
        self._engine, wrapped, *_ = self._deepspeed.initialize(
            model=self._carrier, optimizer=self._optimizer, config=said, dist_init_required=False
        )
        self._split = None
        if self._stage:
            self._split = Partitioned(self._model, wrapped, self._stage, self._world.rank)
        # After it has dropped groups without parameters.
        self._schedule = self._task.schedule(self._optimizer, total_steps)
        self._group = self._optimizer.param_groups[0]

    def remarks(self) -> Sequence[str]:
        return (self._words,)

    def step(self, batch: Batch) -> StepResult:
        seed_dropout(self._task.seed, batch.step, self._world)
        if self._stage and self._plan.precision == "fp16":
            self._engine.optimizer.override_loss_scale(self._scale.value)
        total: Tensor | None = None
        last = batch.microbatches[-1]
        with library.linear(zero3=self._stage == 3), said_plainly():
            for micro in batch.microbatches:
                if micro is not batch.microbatches[0]:
                    self._phase(FORWARD)
                self._engine.set_gradient_accumulation_boundary(micro is last)
                total = self._accumulate(batch, micro, total, micro is last)
        self._reached.check()
        sums = self._tally.sums()
        lr = self._group["lr"]
        norm, skipped = self._update()
        return StepResult(batch=batch, sums=sums, norm=norm, skipped=skipped, lr=lr)

    def _accumulate(self, batch: Batch, micro: Microbatch, before: Tensor | None, last: bool) -> Tensor:
        """Forward and backward of a microbatch; the sum of losses so far."""
        with contextlib.nullcontext() if micro.rows else unnoticed(self._model, self._rows):
            output = self._engine(micro.inputs)
            rows = micro.rows or rows_of(micro.targets)
            with self._autocast:
                values = self._losses.values(output, micro, rows)
            scaled = self._ways if self._stage else self._ways * self._scale.value
            seed = self._losses.seed(values, micro, batch, rows, scaled)
            total = self._losses.total(values, micro, rows)
            total = total if before is None else before + total
            if last:
                self._tally.roots(total, self._flag())
            # The sum's gradient with respect to `values` is the seed; DeepSpeed takes a scalar only.
            self._engine.backward((values.float() * seed.float()).sum(), scale_wrt_gas=False)
        return total

    def _update(self) -> tuple[Tensor | None, bool]:
        self._phase(UPDATE)
        norm, skipped = self._update_split() if self._stage else self._update_whole()
        if not skipped and self._schedule is not None:
            self._schedule.step()
        self._scale.update(skipped)
        return norm, skipped

    def _update_split(self) -> tuple[Tensor | None, bool]:
        """ZeRO's own clipping and its own judgement of infinities, which all its processes share."""
        self._engine.step()
        applied = self._engine.was_step_applied()
        if not applied and self._plan.precision != "fp16":
            # It skips the step in any precision, and would stand still without a word.
            raise DivergedError(
                "the gradient is not finite, though the loss may be. Nothing was saved over: the last checkpoint is "
                "from before. Try a lower lr, and look for square roots, logarithms and divisions at 0 in the loss"
            )
        if not self._needs_norm:
            return None, False
        norm = torch.as_tensor(self._engine.get_global_grad_norm(), device=self._world.device)
        return norm, not applied

    def _update_whole(self) -> tuple[Tensor | None, bool]:
        """Without ZeRO the gradients lie on the parameters, and are clipped as on every other engine."""
        norm = None
        if self._needs_norm:
            norm = gradient_norm(self._parameters) / self._scale.value
            if self._plan.precision == "fp16" and not torch.isfinite(norm):
                self._engine.zero_grad()
                return norm, True
            factor: Tensor | float = 1 / self._scale.value
            if self._task.clip is not None:
                factor = bounding(norm, self._task.clip) * factor
            scale(self._parameters, factor)
        self._engine.step()
        return norm, False

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        scarce = self._plan.saves_memory
        return evaluation.evaluate(
            self._carrier, self._task, self._world, batches, samples, self._autocast, scarce=scarce
        )

    def state(self) -> State:
        if self._split is None:
            saved = model_state.save(self._model, self._optimizer, self._schedule, self._world)
            tensors, own, values = saved
            return State(tensors=tensors, own=own, values={**values, "scale": self._scale.state()})
        values = {"optimizer": self._split.plain(), "scale": self._scale.state()}
        values |= model_state.position(self._schedule, self._world)
        return State(
            tensors=self._split.shapes(),
            own=model_state.own_buffers(self._model, self._world),
            values=values,
            stream=self._split.values,
        )

    def restore(self, saved: Saved) -> None:
        counted = optimizer.counting_as(saved, self._optimizer)
        if self._split is None:
            model_state.restore(self._model, self._optimizer, self._schedule, self._world, counted)
        else:
            model_state.restore_buffers(self._model, self._world, saved)
            self._split.restore(counted)
            if self._schedule is not None:
                replay(self._schedule, saved.values.get("schedule_steps", 0))
        self._scale.restore(saved.values.get("scale", {}))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        gathered = self._split.gathered if self._split is not None else _there
        return model_state.export(self._model, self._world, gathered)

    def close(self) -> None:
        self._engine.destroy()
        # What it is made of refers to itself: its memory, and what its destructors do, must not wait for later.
        del self._engine, self._carrier, self._model, self._split, self._parameters
        gc.collect()
        self._communication.leave()
        self._scratch.close()


@contextlib.contextmanager
def _there(parameter: nn.Parameter) -> Iterator[None]:
    yield


class _Carrier(nn.Module):
    """The model in its precision: DeepSpeed switches autocast off where it finds it around itself."""

    def __init__(self, model: nn.Module, precision: Any) -> None:
        super().__init__()
        self.model, self._precision = model, precision

    def forward(self, inputs: Any) -> Any:
        with self._precision:
            return self.model(inputs)


ENGINE = DeepSpeed
