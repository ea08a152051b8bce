"""Facts of a training's start: machines, model, optimizer and batch, for its user and for run.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grappe.checkpoint.names import MODEL
from grappe.checkpoint.weights import Weights
from grappe.data.loading import Loading
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import tree_leaves
from grappe.training.watchers.base import RunInfo
from grappe.words import count_of, host_name

if TYPE_CHECKING:
    from torch.optim import Optimizer

SHOWN_NODES = 4
SHOWN_FIELDS = ("lr", "momentum", "betas", "weight_decay")
"""Of an optimizer's hyperparameters, those that most optimizers have."""


def start_facts(
    world: World, info: RunInfo, plan: Plan, *, loading: Loading | None, tensors: Weights, example: Any
) -> dict[str, Any]:
    """Returns the facts of this start, for run.json. Collective.

    Args:
        loading: the way in which this process begins to load its samples; None: they are in memory.
        tensors: the checkpoint from which the training starts.
        example: the inputs of one or two samples.
    """
    place = (host_name(), device_name(world.device), 0 if loading is None else loading.workers)
    places = world.gather(place)
    nodes: dict[str, dict[str, int]] = {}
    for host, device, _ in places:
        devices = nodes.setdefault(host, {})
        devices[device] = devices.get(device, 0) + 1
    rows = -(-info.batch_size // (world.data_size * plan.microbatches))
    return {
        "nodes": nodes,
        "processes": world.size,
        "threads": world.threads,
        "workers": max(number for _, _, number in places),
        "parameters": sum(math.prod(tensors.shape(name)) for name in tensors if name.startswith(MODEL)),
        "inputs": [
            [rows, *leaf.shape[1:]]
            for leaf in tree_leaves(example)
            if isinstance(leaf, Tensor) and leaf.dim()
        ],
        "steps_per_epoch": info.steps_per_epoch,
    }


def note_optimizer(facts: dict[str, Any], optimizer: Optimizer, named: object) -> None:
    """Adds an engine's first optimizer: its class, number of parameter groups, the first group's hyperparameters."""
    groups = optimizer.param_groups
    first = groups[0] if groups else {}
    fields = {name: _plain(first[name]) for name in SHOWN_FIELDS if first.get(name)}
    facts.setdefault("optimizer", {"class": type(optimizer).__name__, "groups": len(groups), **fields})


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields the facts as lines for the user."""
    nodes = facts["nodes"]
    places = [_place(host, devices, facts["processes"]) for host, devices in nodes.items()]
    more = f" and {len(places) - SHOWN_NODES} more" if len(places) > SHOWN_NODES else ""
    yield (
        f"{count_of(len(nodes), 'node')}: {', '.join(places[:SHOWN_NODES])}{more}; each process "
        f"{count_of(facts['threads'], 'thread')}, {count_of(facts['workers'], 'data worker')}"
    )
    shapes = " and ".join(str(shape) for shape in facts["inputs"]) or "no tensors"
    yield (
        f"{facts['parameters']:,} parameters, {_optimizer(facts.get('optimizer'))}, inputs {shapes}, "
        f"{count_of(facts['steps_per_epoch'], 'step')} an epoch"
    )


def device_name(device: torch.device) -> str:
    """Returns the GPU's model, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _place(host: str, devices: Mapping[str, int], processes: int) -> str:
    shown = ", ".join(f"{count} x {name}" if processes > 1 else name for name, count in devices.items())
    return f"{host} ({shown})"


def _optimizer(optimizer: Mapping[str, Any] | None) -> str:
    if optimizer is None:
        return "no optimizer"
    fields = [f"{name}={optimizer[name]}" for name in SHOWN_FIELDS if name in optimizer]
    groups = [count_of(optimizer["groups"], "group")] if optimizer["groups"] > 1 else []
    return f"{optimizer['class']}({', '.join([*fields, *groups])})"


def _plain(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return value.item() if hasattr(value, "item") else value  # of a tensor, of NumPy's
