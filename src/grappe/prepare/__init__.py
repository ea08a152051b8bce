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

from grappe.plan import Plan
from grappe.prepare.batchnorm import Rows, synchronise_batchnorm
from grappe.prepare.compiling import compile_units
from grappe.prepare.materialise import fill, on_meta
from grappe.prepare.precision import autocast
from grappe.prepare.recompute import recompute_units
from grappe.prepare.replicate import Rehearse, Replicas
from grappe.prepare.shard import shard, uses_shard, when_to_reduce
from grappe.prepare.tally import ReduceTally, Tally
from grappe.prepare.tensor import split_tensors
from grappe.task import Task
from grappe.weights import Weights
from grappe.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model spread as a plan says."""

    model: nn.Module
    """The task's own modules and names; its parameters may be sharded."""
    forward: Callable[[Any], Any]
    """What a training step calls with a microbatch's inputs."""
    begin: Callable[[Rehearse], Tally] | None
    """Told at the first step how to rehearse it; gives another tally."""
    synchronise: Callable[[bool], None] | None
    """Told before each microbatch whether it is the step's last; None: every backward may reduce."""
    tally: Tally
    autocast: contextlib.AbstractContextManager[Any] | None
    rows: Rows | None
    """Where synchronised batch normalisation is told of rows that are only filled in."""


Keep = Callable[[nn.Module, list[nn.Module]], list[tuple[nn.Module, list[nn.Module]]]]
"""From a model and its units: what of it this process calls, each part with its own units; the rest is taken out."""


def prepare(
    task: Task, plan: Plan, world: World, weights: Weights, keep: Keep = lambda model, units: [(model, units)]
) -> Prepared:
    """The task's model, spread over `world`'s processes, its values read from `weights`. Collective."""
    model = on_meta(task)
    units = list(task.units(model))
    split_tensors(model, task, plan, world)
    for part, inside in keep(model, units):
        if plan.recompute:
            recompute_units(inside or [part])
        if plan.compile:
            compile_units(inside or [part])
        if uses_shard(plan):
            shard(part, inside, plan, world)
    fill(model, weights, world.device)
    if plan.channels_last and not uses_shard(plan):  # FSDP2 refuses parameters that are not contiguous
        model.to(memory_format=torch.channels_last)  # pyrefly: ignore
    rows = Rows()
    group = world.data_group if plan.batchnorm == "sync" else None
    if group is not None:
        synchronise_batchnorm(model, group, rows)
    prepared = Prepared(
        model=model,
        forward=model,
        begin=None,
        synchronise=when_to_reduce(model, plan) if uses_shard(plan) and plan.pipeline == 1 else None,
        tally=ReduceTally(world) if world.size > 1 else Tally(world.device),
        autocast=autocast(plan.precision, world.device),
        rows=rows if group is not None else None,
    )
    if uses_shard(plan) or world.data_group is None or plan.pipeline > 1 or plan.exact:
        return prepared
    replicas = Replicas(model, world)
    return dataclasses.replace(
        prepared,
        forward=replicas,
        begin=replicas.begin,
        synchronise=replicas.synchronise if plan.microbatches > 1 else None,
    )
