"""What a training's future depends on: a model, its optimizer and schedule, as named tensors and JSON, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe import optimizer_state
from grappe.prepare.batchnorm import agreed
from grappe.schedule import replay
from grappe.weights import copy_into, named_tensors, whole
from grappe.world import World

if TYPE_CHECKING:
    from grappe.engines.base import Saved


def save(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, world: World
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors `model.NAME`, `optimizer.NAME.KEY` and, of each data slice, `local.RANK.BUFFER`; and JSON. Collective."""
    tensors, values = optimizer_state.save(model, optimizer)
    tensors.update({f"model.{name}": parameter for name, parameter in model.named_parameters()})
    tensors.update({f"model.{name}": buffer for name, buffer in _agreed_buffers(model, world)})
    mine = {name: whole(buffer) for name, buffer in model.named_buffers()}
    for rank, buffers in enumerate(world.gather_data(mine)):
        tensors.update({f"local.{rank}.{name}": buffer for name, buffer in buffers.items()})
    values["schedule_steps"] = schedule.last_epoch if schedule is not None else 0
    values["data_parallel"] = world.data_size
    return tensors, values


def restore(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, world: World, saved: Saved
) -> None:
    """Puts back what `save` gave. On as many data slices as before each gets its own buffers, else the agreed ones."""
    alike = saved.values.get("data_parallel") == world.data_size
    for name, tensor in named_tensors(model).items():
        own = f"local.{world.data_rank}.{name}"
        copy_into(tensor, saved.tensors.read(own if alike and own in saved.tensors else f"model.{name}"))
    optimizer_state.load(model, optimizer, saved)
    if schedule is not None:
        replay(schedule, saved.values.get("schedule_steps", 0))


def export(model: nn.Module, world: World) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters and buffers on the CPU, one at a time. Collective."""
    for name, parameter in model.named_parameters():
        yield name, whole(parameter)
    for name, buffer in _agreed_buffers(model, world):
        yield name, whole(buffer)


def _agreed_buffers(model: nn.Module, world: World) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in model.named_buffers():
        group = world.data_group if buffer.is_floating_point() else None
        yield name, buffer if group is None else agreed(buffer, group)
