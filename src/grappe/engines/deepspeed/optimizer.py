"""Chooses the optimizer that DeepSpeed steps: the task's, or DeepSpeed's kernel of the same Adam if it is faster."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.optim import Optimizer

from grappe.checkpoint.weights import InMemory, Renamed, Weights
from grappe.engines.deepspeed import library
from grappe.engines.shared.state import SavedState
from grappe.errors import PlanError
from grappe.launch.world import World
from grappe.plan import Plan

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
