"""parallelize: spreads a task's model over processes, by functions of one file each, applied in a fixed order.

tensor -> activation checkpointing -> compile -> shard -> weights -> batch normalisation. A degree of 1 does nothing.
Replication wraps the model instead of changing it: see replicate.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from grappe.checkpoint.weights import Weights
from grappe.data.batch import stored_in
from grappe.domain.parts import take_terms
from grappe.launch.world import World
from grappe.parallel.activation_checkpointing import checkpoint_activations, switch_off_caches
from grappe.parallel.batchnorm import synchronise_batchnorm
from grappe.parallel.compile import compile_units
from grappe.parallel.materialise import fill, marks_kept, on_meta, refuse_hooks
from grappe.parallel.shard import shard, sum_scalars
from grappe.parallel.units import units_of
from grappe.plan import Plan
from grappe.private_api.torch import tree_map
from grappe.step.precision import LOWER, autocast
from grappe.task import Task

KEYS = frozenset({
    "replicate", "shard", "zero", "tensor", "microbatches", "precision", "batchnorm", "channels_last", "recompute",
    "compile", "offload",
})  # fmt: skip
"""The plan's keys that an engine honours when its model comes from `parallelize`."""
Keep = Callable[[nn.Module, list[nn.Module]], Sequence[tuple[nn.Module, list[nn.Module]]]]
"""Maps a model and its units to the parts that this process calls, each with its units; removes the rest."""


def parallelize(
    task: Task,
    plan: Plan,
    world: World,
    weights: Weights,
    keep: Keep = lambda model, units: [(model, units)],
    blocks: Sequence[str] = (),
) -> nn.Module:
    """Makes the task's model, spread over `world`'s processes, with values from `weights`. Collective.

    Args:
        blocks: the names of its units, where the task gives none.

    Returns:
        The task's own modules and names, in training mode; parameters may be sharded.
    """
    model = on_meta(task, stored_in(plan))
    refuse_hooks(model, plan)  # before shard makes other parameters
    units = units_of(task, model, blocks)
    if plan.recompute:
        switch_off_caches(model)
    if plan.tensor > 1:
        from grappe.parallel.tensor import split_tensors

        split_tensors(model, task, plan, world)
    with marks_kept(model):
        for part, inside in keep(model, units):
            prepare_units(part, inside, plan, world)
        fill(model, weights, world.device, offloaded=plan.offload == "cpu")
    prepare_filled(model, plan, world)
    return model.train()


def prepare_units(model: nn.Module, units: Sequence[nn.Module], plan: Plan, world: World) -> None:
    """Recomputes, compiles and shards each unit as the plan says; without units the model as a whole. Collective."""
    if plan.recompute and plan.pipeline == 1:  # a pipeline's units are numbered over all its stages
        checkpoint_activations(units or [model], plan)
    if plan.compile:
        compile_units(units or [model], plan)
    if plan.uses_fsdp:
        shard(model, units, plan, world)


def prepare_filled(model: nn.Module, plan: Plan, world: World) -> None:
    """Does to a model what it needs its values for: scalars' sums, channels last, synchronised batch normalisation."""
    if world.domain is not None:  # of what FSDP2 sums, it gets them itself
        take_terms((each for each in model.parameters() if not plan.uses_fsdp or not each.dim()), world.domain)
    if plan.uses_fsdp:
        sum_scalars(model, world)
    if plan.channels_last and not plan.uses_fsdp:  # FSDP2 refuses parameters that are not contiguous
        model.to(memory_format=torch.channels_last)  # pyrefly: ignore
    if plan.synchronises and world.data_group is not None:
        synchronise_batchnorm(model, world.data_group)


def prepare_made(model: nn.Module, units: Sequence[nn.Module], plan: Plan, world: World) -> None:
    """Does to a model that a script has made, with its values, what a plan's keys say that do not shard it."""
    if plan.recompute:
        switch_off_caches(model)
    prepare_units(model, units, plan, world)
    prepare_filled(model, plan, world)
    if plan.precision in LOWER:
        # The forward runs under autocast, and gives float32; loss and update stay in float32. A copy gets its own.
        model.forward = functools.partial(_lowered, model.forward, autocast(plan.precision, world.device))


def _lowered(
    forward: Callable[..., Any], precision: contextlib.AbstractContextManager[Any], *arguments: Any, **options: Any
) -> Any:
    with precision:
        output = forward(*arguments, **options)
    return tree_map(lambda leaf: leaf.float() if getattr(leaf, "dtype", None) in LOWER.values() else leaf, output)
