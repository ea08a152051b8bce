"""What a training's future depends on: a model, its optimizer and schedule, as named tensors and JSON, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe import optimizer_state
from grappe.checkpoint.format import LOCAL, MODEL
from grappe.checkpoint.model_weights import ModelWeights
from grappe.prepare.batchnorm import agreed_between
from grappe.schedule import replay
from grappe.weights import read_into, whole
from grappe.world import World

if TYPE_CHECKING:
    from grappe.engines.base import Saved

Parts = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]


def save(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, world: World) -> Parts:
    """Tensors that all processes have alike or share, this process's own buffers, and JSON."""
    tensors, values = optimizer_state.save(model, optimizer)
    tensors.update({f"{MODEL}{name}": parameter for name, parameter in model.named_parameters()})
    return tensors, own_buffers(model, world), values | position(schedule, world)


def own_buffers(model: nn.Module, world: World) -> dict[str, Tensor]:
    """What this process alone has of a model, by name."""
    if not world.speaks_for_buffers:
        return {}
    return {f"{LOCAL}{world.data_rank}.{name}": buffer for name, buffer in model.named_buffers()}


def position(schedule: LRScheduler | None, world: World) -> dict[str, Any]:
    """Where the schedule stands, and how many slices the buffers belong to, as JSON."""
    steps = schedule.last_epoch if schedule is not None else 0
    return {"schedule_steps": steps, "data_parallel": world.data_size}


def restore(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, world: World, saved: Saved
) -> None:
    """Puts back what `save` gave."""
    weights = ModelWeights(saved.tensors)
    for name, parameter in model.named_parameters():
        read_into(parameter, weights, name)
    restore_buffers(model, world, saved)
    optimizer_state.load(model, optimizer, saved)
    if schedule is not None:
        replay(schedule, saved.values.get("schedule_steps", 0))


def restore_buffers(model: nn.Module, world: World, saved: Saved) -> None:
    """On as many data slices as before each has its own buffers again, else their mean."""
    weights = ModelWeights(saved.tensors)
    alike = saved.values.get("data_parallel") == world.data_size
    for name, buffer in model.named_buffers():
        own = f"{LOCAL}{world.data_rank}.{name}"
        if alike and own in saved.tensors:
            read_into(buffer, saved.tensors, own)
        else:
            read_into(buffer, weights, name)


Gathered = Callable[[nn.Parameter], AbstractContextManager[None]]
"""Inside, a parameter is whole, on engines that keep it elsewhere."""


def export(
    model: nn.Module, world: World, gathered: Gathered = lambda _: nullcontext()
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters and buffers on the CPU, one at a time. Collective."""
    for name, parameter in model.named_parameters():
        with gathered(parameter):
            yield name, whole(parameter)
    for name, buffer in model.named_buffers():
        group = world.data_group if buffer.is_floating_point() else None
        yield name, whole(buffer if group is None else agreed_between(buffer, group))
