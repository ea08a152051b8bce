"""Chooses the optimizer that DeepSpeed steps, and converts its state to named whole tensors, one at a time, and back.

DeepSpeed's own checkpoints are pickles, and are not used: tensors go through its safe_get and safe_set functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe.checkpoint.weights import MODEL, InMemory, ModelWeights, Renamed, Weights
from grappe.contrib.deepspeed import library
from grappe.engines.shared.state import (
    OPTIMIZER,
    ModelState,
    SavedState,
    State,
    export,
    own_buffers,
    position,
    replay,
    restore_buffers,
)
from grappe.errors import PlanError
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api import deepspeed as private
from grappe.step.precision import LossScale

ELEMENTWISE = frozenset({
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "ASGD", "Rprop",
    "DeepSpeedCPUAdam", "FusedAdam", "DeepSpeedCPULion", "FusedLion",
})  # fmt: skip
"""Optimizers that treat each number independently, so that they may get flattened parameters."""


def check_elementwise(optimizer: Optimizer, stage: int) -> None:
    """Raises PlanError if the optimizer would compute other updates on flattened parameters."""
    kind = type(optimizer)
    elementwise = kind.__name__ in ELEMENTWISE and kind.__module__.startswith(("torch.optim", "deepspeed."))
    if stage and not elementwise:
        raise PlanError(
            f"engine=deepspeed with shard or offload gives the optimizer flat pieces of several parameters, and "
            f"{kind.__name__} may need whole ones (norms, matrices, other weights to evaluate): "
            f"use replicate=N, or engine=native, where each parameter stays one"
        )


def chosen(optimizer: Optimizer, plan: Plan, world: World) -> tuple[Optimizer, str]:
    """Returns DeepSpeed's kernel of the task's optimizer, or that optimizer; and its description. Collective."""
    name = type(optimizer).__name__
    if not _plain_adam(optimizer):
        return optimizer, f"torch's {name}"
    if plan.offload != "none":
        if library.built_everywhere("CPUAdamBuilder", world):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            adam = _kernel(DeepSpeedCPUAdam, optimizer, "adamw_mode")
            adam.register_step_pre_hook(_fresh_powers)
            return adam, f"DeepSpeed's CPU Adam for the task's {name}"
        return optimizer, f"torch's {name} (DeepSpeed's CPU Adam cannot be compiled here)"
    if world.device.type == "cuda":
        if library.built_everywhere("FusedAdamBuilder", world):
            from deepspeed.ops.adam import FusedAdam

            return _kernel(FusedAdam, optimizer, "adam_w_mode"), f"DeepSpeed's fused Adam for the task's {name}"
        return optimizer, f"torch's {name} (DeepSpeed's fused Adam needs nvcc, of torch's CUDA version)"
    return optimizer, f"torch's {name}"


def counting_as(saved: SavedState, optimizer: Optimizer) -> SavedState:
    """Converts step counters of `saved` to `optimizer`'s type: numbers for DeepSpeed's kernels, tensors for torch."""
    numbers = type(optimizer).__module__.startswith("deepspeed.")
    plain = {name: dict(state) for name, state in saved.values.get("optimizer", {}).items()}
    sources: dict[str, tuple[Weights, str]] = {name: (saved.tensors, name) for name in saved.tensors}
    for full in saved.tensors:
        name, _, key = full.removeprefix("optimizer.").rpartition(".")
        if full.startswith("optimizer.") and key == "step" and numbers:
            plain.setdefault(name, {})["step"] = int(saved.tensors.read(full))
            del sources[full]
    for name, state in plain.items():
        if "step" in state and not numbers:
            full = f"optimizer.{name}.step"
            sources[full] = InMemory({full: torch.tensor(float(state.pop("step")))}), full
    return dataclasses.replace(saved, tensors=Renamed(sources), values={**saved.values, "optimizer": plain})


def _plain_adam(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer is Adam or AdamW, with options that DeepSpeed's kernels have."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    groups = optimizer.param_groups
    plain = not any(group.get(name) for group in groups for name in ("amsgrad", "maximize", "capturable"))
    numbers = all(isinstance(group[name], float | int) for group in groups for name in ("lr", "weight_decay"))
    return plain and numbers and len({_decoupled(optimizer, group) for group in groups}) == 1


def _decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Returns whether weight decay is AdamW's; an option of Adam requests the same."""
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


def _kernel(make: Any, optimizer: Optimizer, decoupled: str) -> Optimizer:
    """Makes DeepSpeed's kernel with the groups and options of an Adam; `decoupled`: its argument for AdamW's decay."""
    options = ("lr", "betas", "eps", "weight_decay")
    kept = ("params", *options, "initial_lr")
    groups = [{name: group[name] for name in kept if name in group} for group in optimizer.param_groups]
    first = optimizer.param_groups[0]
    return make(groups, **{name: first[name] for name in options}, **{decoupled: _decoupled(optimizer, first)})


def _fresh_powers(optimizer: Any, *_: Any) -> None:
    """Makes the kernel compute beta to the power of the step again.

    Otherwise the kernel multiplies from step to step, which a resumed training cannot do: a resumed training would
    have other bits than an uninterrupted one.
    """
    first, kernel, number = optimizer.param_groups[0], optimizer.ds_opt_adam, optimizer.opt_id
    kernel.destroy_adam(number)
    beta, second = first["betas"]
    settings = (first["lr"], beta, second, first["eps"], first["weight_decay"], optimizer.adam_w_mode, False)
    kernel.create_adam(number, *settings)


def saved_keys(saved: SavedState, shapes: dict[str, tuple[int, ...]]) -> tuple[list[str], dict[str, Any]]:
    """Returns a saved optimizer state's keys of their parameter's shape, and the state common to all parameters."""
    split: list[str] = []
    alike: dict[str, Any] = {}
    for full in saved.tensors:
        if not full.startswith(OPTIMIZER):
            continue
        name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
        if saved.tensors.shape(full) == shapes.get(name) and shapes[name]:
            split += [key] if key not in split else []
        elif not saved.tensors.shape(full) and key not in split:
            alike[key] = saved.tensors.read(full)
    for plain in saved.values.get("optimizer", {}).values():
        alike |= plain
    return split, {key: value for key, value in alike.items() if key not in split}


def _shape(parameter: Any) -> tuple[int, ...]:
    """Returns the whole parameter's shape, partitioned or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _meta(parameter: nn.Parameter) -> Tensor:
    return torch.empty(_shape(parameter), dtype=parameter.dtype, device="meta")


class WholeState(ModelState):
    """A ModelState whose optimizer may be DeepSpeed's own."""

    def restore(self, saved: SavedState) -> None:
        """Restores a state that `state` returned."""
        super().restore(counting_as(saved, self._optimizer))


@dataclasses.dataclass(kw_only=True, eq=False)
class PartitionedState:
    """The state of a model whose parameters and optimizer state ZeRO partitions, in stages 1 to 3; buffers are not."""

    model: nn.Module
    optimizer: Optimizer
    wrapped: Any
    """DeepSpeed's ZeRO optimizer, which wraps the given one."""
    stage: int
    schedule: LRScheduler | None
    world: World
    loss_scale: LossScale

    def state(self) -> State:
        """Returns the state to save: shapes, and a stream of whole tensors."""
        values: dict[str, Any] = {
            "optimizer": self.plain(),
            "scale": self.loss_scale.state(),
            **position(self.schedule, self.world),
        }
        local = own_buffers(self.model, self.world)
        return State(tensors=self.shapes(), local=local, values=values, stream=self.values)

    def restore(self, saved: SavedState) -> None:
        """Restores a state that `state` returned, or another engine's, of any number of processes. Collective."""
        restore_buffers(self.model, self.world, saved)
        saved = counting_as(saved, self.optimizer)
        if not saved.model_loaded:
            weights = ModelWeights(saved.tensors)
            for name, parameter in self.model.named_parameters():
                value = weights.read(name).to(parameter.device)
                with self.gathered(parameter, changed=True), torch.no_grad():
                    if self.stage < 3 or self.world.rank == 0:
                        parameter.copy_(value)
                if parameter.requires_grad:
                    self._set(parameter, value, None)
        split, counters = saved_keys(saved, {name: _shape(p) for name, p in self._trained()})
        if split or counters:
            self._make_states(split, counters)
        for name, parameter in self._trained():
            for key in split:
                self._set(parameter, saved.tensors.read(f"{OPTIMIZER}{name}.{key}"), key)
        replay(self.schedule, saved)
        self.loss_scale.restore(saved.values.get("scale", {}))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields whole parameters and buffers, one at a time. Collective."""
        return export(self.model, self.world, self.gathered)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Changes nothing: optimizers with other weights to evaluate are refused where parameters are flattened."""
        return nullcontext()

    def shapes(self) -> dict[str, Tensor]:
        """Returns every tensor of the state by name, on the meta device."""
        shapes = {}
        for name, parameter in self.model.named_parameters():
            shapes[f"{MODEL}{name}"] = _meta(parameter)
        split, counters = self._keys()
        for name, parameter in self._trained():
            for key in split:
                shapes[f"{OPTIMIZER}{name}.{key}"] = _meta(parameter).float()
            for key, value in counters.items():
                if isinstance(value, Tensor):
                    shapes[f"{OPTIMIZER}{name}.{key}"] = value.to("meta")
        return shapes

    def plain(self) -> dict[str, dict[str, Any]]:
        """Returns, by parameter, the entries of its state that are not tensors."""
        counters = {k: v for k, v in self._keys()[1].items() if not isinstance(v, Tensor) and v is not None}
        return {name: dict(counters) for name, _ in self._trained()} if counters else {}

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the whole tensors of `shapes`, in the same order, one at a time. Collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, parameter in self.model.named_parameters():
            with self.gathered(parameter):
                yield f"{MODEL}{name}", parameter.detach()
        split, counters = self._keys()
        if split:
            self._link()
        for name, parameter in self._trained():
            for key in split:
                state = safe_get_full_optimizer_state(parameter, key)
                assert state is not None
                yield f"{OPTIMIZER}{name}.{key}", state.view(_shape(parameter))
            for key, value in counters.items():
                if isinstance(value, Tensor):
                    yield f"{OPTIMIZER}{name}.{key}", value

    def _set(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Sets a parameter's optimizer state `key`, or the optimizer's copy of the parameter, from a whole tensor."""
        from deepspeed import utils

        value = value.to(parameter.device, torch.float32)
        if self.stage == 3:
            # Its own safe_set_full_… fail where a parameter's numbers cannot be divided by the processes.
            size = parameter.partition_numel()  # pyrefly: ignore
            part = value.new_zeros(size)  # padded with zeros as DeepSpeed does
            values = value.flatten()[size * self.world.rank : size * (self.world.rank + 1)]
            part[: len(values)] = values
            group, *_ = self.wrapped.grad_position[self.wrapped.get_param_id(parameter)]
            if private.is_swapped(self.wrapped, group):
                # safe_set_local_… would compare it with a parameter that is not in memory.
                state, group = private.state_partition(self.wrapped, parameter, key)
                state.data.copy_(part)
                private.swap_out(self.wrapped, group)
            elif key is None:
                utils.safe_set_local_fp32_param(parameter, part)
            else:
                utils.safe_set_local_optimizer_state(parameter, part, key)
        elif key is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)

    def _make_states(self, split: list[str], counters: dict[str, Any]) -> None:
        """Makes the optimizer state of zeros that the given optimizer would make in its first step."""
        optimizer = self.wrapped.optimizer
        for index, flat in enumerate(self._flat):
            swapped = self.stage == 3 and private.is_swapped(self.wrapped, index)
            if swapped:
                private.swap_in(self.wrapped, index)
            optimizer.state[flat] = {
                **{key: value.clone() if isinstance(value, Tensor) else value for key, value in counters.items()},
                **{key: torch.zeros_like(flat, requires_grad=False) for key in split},
            }
            if swapped:
                private.swap_out(self.wrapped, index)
        for group in optimizer.param_groups:
            if "step" in group and "step" in counters:  # DeepSpeed's fused Adam counts by group
                group["step"] = counters["step"]
        if split:
            self._link()

    def _link(self) -> None:
        """Links each parameter's state to its part of the flat state, for stages 1 and 2.

        DeepSpeed links once, after the first group's first step, when the other groups have no state yet.
        """
        if self.stage < 3:
            private.link_states(self.wrapped)

    @contextlib.contextmanager
    def gathered(self, parameter: nn.Parameter, changed: bool = False) -> Iterator[None]:
        """Context with the whole parameter; `changed`: process 0 changes the value for all processes. Collective."""
        if self.stage < 3:
            yield
            return
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], modifier_rank=0 if changed else None):
            yield

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    @property
    def _flat(self) -> list[Tensor]:
        """Returns this process's part of the parameters, flattened, which the given optimizer steps."""
        if self.stage == 3:
            return self.wrapped.fp32_partitioned_groups_flat
        return self.wrapped.single_partition_of_fp32_groups

    def _keys(self) -> tuple[list[str], dict[str, Any]]:
        """Returns the keys of state that is partitioned like the parameters, and the state common to all parameters."""
        optimizer = self.wrapped.optimizer
        split: list[str] = []
        alike: dict[str, Any] = {}
        for flat in self._flat:
            for key, value in optimizer.state.get(flat, {}).items():
                if not (isinstance(value, Tensor) and value.dim()):
                    alike[key] = value
                elif key not in split:
                    split.append(key)
        if "step" in optimizer.param_groups[0]:
            alike["step"] = optimizer.param_groups[0]["step"]
        return split, alike
