"""What a training's future depends on: a model, its optimizer and schedule, as named tensors and JSON, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe import optimizer_state
from grappe.checkpoint.format import LOCAL, MODEL, ModelWeights
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
    own = {}
    if world.speaks_for_buffers:
        own = {f"{LOCAL}{world.data_rank}.{name}": buffer for name, buffer in model.named_buffers()}
    values["schedule_steps"] = schedule.last_epoch if schedule is not None else 0
    values["data_parallel"] = world.data_size
    return tensors, own, values


def restore(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, world: World, saved: Saved
) -> None:
    """Puts back what `save` gave. On as many data slices as before each has its own buffers again, else their mean."""
    weights = ModelWeights(saved.tensors)
    alike = saved.values.get("data_parallel") == world.data_size
    for name, parameter in model.named_parameters():
        read_into(parameter, weights, name)
    for name, buffer in model.named_buffers():
        own = f"{LOCAL}{world.data_rank}.{name}"
        if alike and own in saved.tensors:
            read_into(buffer, saved.tensors, own)
        else:
            read_into(buffer, weights, name)
    optimizer_state.load(model, optimizer, saved)
    if schedule is not None:
        replay(schedule, saved.values.get("schedule_steps", 0))


def export(model: nn.Module, world: World) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters and buffers on the CPU, one at a time. Collective."""
    for name, parameter in model.named_parameters():
        yield name, whole(parameter)
    for name, buffer in model.named_buffers():
        group = world.data_group if buffer.is_floating_point() else None
        yield name, whole(buffer if group is None else agreed_between(buffer, group))
