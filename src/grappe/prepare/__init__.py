"""Spreads a task's model over processes: one function a file, applied in a fixed order.

tensor -> recompute -> compile -> shard or replicate -> weights -> batch normalisation. A degree of 1 does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from grappe.errors import TaskError
from grappe.plan import Plan
from grappe.prepare.batchnorm import Rows, synchronise_batchnorm
from grappe.prepare.compiling import compile_units
from grappe.prepare.precision import autocast
from grappe.prepare.recompute import recompute_units
from grappe.prepare.replicate import Carrier, replicate
from grappe.prepare.shard import shard, uses_shard, when_to_reduce
from grappe.prepare.tally import ReduceTally, RiderTally, Tally
from grappe.prepare.tensor import split_tensors
from grappe.task import Task
from grappe.weights import Weights, copy_into, named_tensors
from grappe.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model spread as a plan says."""

    model: nn.Module
    """The task's own modules and names; its parameters may be sharded."""
    forward: Callable[[Any], Any]
    """What a training step calls with a microbatch's inputs."""
    synchronise: Callable[[bool], None] | None
    """Told before each microbatch whether it is the step's last; None: every backward may reduce."""
    tally: Tally
    autocast: contextlib.AbstractContextManager[Any] | None
    rows: Rows | None
    """Where synchronised batch normalisation is told of rows that are only filled in."""


def prepare(task: Task, plan: Plan, world: World, weights: Weights) -> Prepared:
    """The task's model, spread over `world`'s processes, its values read from `weights`. Collective."""
    model = on_meta(task)
    units = list(task.units(model))
    split_tensors(model, task, plan, world)
    if plan.recompute:
        recompute_units(units or [model])
    if plan.compile:
        compile_units(units or [model])
    if uses_shard(plan):
        shard(model, units, plan, world)
    fill(model, weights, world.device)
    if plan.channels_last and not uses_shard(plan):  # FSDP2 refuses parameters that are not contiguous
        model.to(memory_format=torch.channels_last)  # pyrefly: ignore
    rows = Rows()
    group = world.data_group if plan.batchnorm == "sync" else None
    if group is not None:
        synchronise_batchnorm(model, group, rows)
    forward, synchronise, tally = _communication(model, plan, world)
    return Prepared(
        model=model,
        forward=forward,
        synchronise=synchronise,
        tally=tally,
        autocast=autocast(plan.precision, world.device),
        rows=rows if group is not None else None,
    )


def _communication(model: nn.Module, plan: Plan, world: World) -> tuple[Any, Any, Tally]:
    if uses_shard(plan):
        return model, when_to_reduce(model, plan), ReduceTally(world)
    if world.data_group is None:
        return model, None, ReduceTally(world) if world.size > 1 else Tally(world.device)
    carrier = Carrier(model, world.device)
    wrapped = replicate(carrier, plan, world)

    def synchronise(last: bool) -> None:
        wrapped.require_backward_grad_sync = last

    several = plan.microbatches > 1
    return wrapped, synchronise if several else None, RiderTally(carrier.rider, world.data_size)


def on_meta(task: Task) -> nn.Module:
    """The task's model without memory or values; on the CPU where a model cannot be made so."""
    try:
        with torch.device("meta"):
            model = task.model()
        if not _has_loose_tensors(model):
            return _checked(task, model)
    except (RuntimeError, NotImplementedError):
        pass  # it computes with values while it is made; then it has to have them
    return _checked(task, task.model())


def _checked(task: Task, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TaskError(f"{type(task).__name__}.model() returned {type(model).__name__}: return an nn.Module")
    return model


def _has_loose_tensors(model: nn.Module) -> bool:
    """Whether a module keeps a tensor that is neither parameter nor buffer: nothing would fill it."""
    return any(
        isinstance(value, torch.Tensor) and value.is_meta
        for module in model.modules()
        for value in vars(module).values()
    )


def fill(model: nn.Module, weights: Weights, device: torch.device) -> None:
    """Gives the model memory on `device` and the values of `weights`; tied tensors stay tied.

    Raises:
        TaskError: a parameter or buffer has no value in `weights`, or another shape.
    """
    ties = _ties(model)
    if device.type == "cuda" or any(tensor.is_meta for tensor in named_tensors(model).values()):
        model.to_empty(device=device)
    for first, *others in ties:
        tensor = first[0]._parameters.get(first[1], first[0]._buffers.get(first[1]))
        for module, name in others:
            home: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            home[name] = tensor
    for name, tensor in named_tensors(model).items():
        if name not in weights:
            raise TaskError(f"the model has '{name}', the weights do not: are they another model's?")
        value = weights.read(name)
        if value.shape != tensor.shape:
            raise TaskError(
                f"'{name}' is {list(tensor.shape)} in the model and {list(value.shape)} in the weights"
            )
        copy_into(tensor, value)


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            for name, tensor in home.items():
                if tensor is not None:
                    sites.setdefault(id(tensor), []).append((module, name))
    return [places for places in sites.values() if len(places) > 1]
