"""Prints a training's header at its start, and makes the watchers that report its progress."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from grappe.checkpoint.weights import MODEL, Weights
from grappe.data.loading import Loading
from grappe.engines.base import Engine, EngineSetup
from grappe.launch.terminal import UserStream, say
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import BatchNormBase, tree_leaves
from grappe.task import Task
from grappe.training.request import Request
from grappe.training.run import Run, short_name
from grappe.training.watchers.base import RunInfo, Watcher
from grappe.training.watchers.console import Console, sample_word
from grappe.training.watchers.curves import Curves
from grappe.training.watchers.expected_end import ExpectedEnd
from grappe.training.watchers.logger import find as find_logger
from grappe.training.watchers.profile import Profile
from grappe.words import count_of, format_bytes, host_name, plan_name

SHOWN_NODES = 4
SHOWN_FIELDS = ("lr", "momentum", "betas", "weight_decay")
"""Hyperparameters that most optimizers have."""


def reporting(
    request: Request, terminal: UserStream | None, samples: Any, world: World, info: RunInfo, deadline: float | None
) -> list[Watcher]:
    """Makes the watchers that report to the user: curves, console and loggers on process 0, and requested profiles.

    Args:
        samples: the training dataset.
        deadline: the end of the time limit or of the job, as time.time has it; None: there is none.
    """
    watchers, options = list[Watcher](), request.options
    if world.rank == 0:
        watchers.append(Curves())
        if terminal is not None:
            every = options.evaluations_every(info.steps_per_epoch)
            end = ExpectedEnd(every, stops_early=options.patience is not None, deadline=deadline)
            prints = options.printing(info.steps_per_epoch)
            watchers.append(Console(terminal, sample_word(samples), prints, end=end, typed=request.typed))
        watchers += [find_logger(name)() for name in options.log]
    if world.rank in options.profile:
        watchers.append(Profile(world.rank, options.profile_steps, terminal, after=options.profile_after))
    return watchers


def announce(terminal: UserStream, task: Task, info: RunInfo, plan: Plan, notes: Iterable[str], world: World) -> None:
    """Shows the task, its plan, batch and run, and notes about them."""
    slices, micro = world.data_size, plan.microbatches
    each = -(-task.batch_size // slices)
    batch = str(task.batch_size)
    if slices > 1 or micro > 1:
        batch = f"{task.batch_size} over all processes = {slices} x {each}"
    if micro > 1:
        batch = f"{batch}, each in {micro} microbatches"
    name, kind = short_name(info.task), type(task).__name__
    name = name if name.replace("_", "") == kind.lower() else f"{name} ({kind})"
    say(
        f"{name} on {count_of(world.size, 'process')} ({world.device.type}, "
        f"{count_of(world.threads, 'thread')} each), plan: {plan_name(plan)}",
        terminal,
    )
    say(f"{info.samples:,} training samples, batch {batch}; run {info.folder}", terminal)
    for note in (*notes, *task.notes()):
        say(note, terminal)


def report(facts: Mapping[str, Any], run: Run, terminal: UserStream | None, world: World) -> None:
    """Writes the facts of this start to run.json, and shows them."""
    if world.rank == 0:
        run.describe(start=facts)
    if terminal is not None:
        say("".join(f"{line}\n" for line in lines(facts)), terminal, end="")


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
        "workers_unused": (plan.workers or 0) if loading is None else 0,
        "parameters": sum(math.prod(tensors.shape(name)) for name in tensors if name.startswith(MODEL)),
        "inputs": [[rows, *leaf.shape[1:]] for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()],
        "steps_per_epoch": info.steps_per_epoch,
    }


def unit_facts(engine: type[Engine], setup: EngineSetup) -> dict[str, Any]:
    """Returns the facts on batch normalisation, and on the units of a model whose task gives none. Collective."""
    shards = engine.sharded_units and setup.plan.uses_fsdp
    model = setup.carried.model
    normalised = model is not None and any(
        isinstance(each, BatchNormBase) and each.training for each in model.modules()
    )
    facts = {"statistics": setup.plan.statistics} if any(setup.world.gather(normalised)) else {}
    if not (shards or setup.plan.recompute):
        return facts
    return facts | {
        "units": list(setup.blocks.names),
        "gathered": setup.blocks.ungrouped if shards and setup.plan.zero == 3 else 0,
        "recomputed_at_once": setup.plan.recompute is True and setup.blocks.ungrouped > 0,
        "kept_where_they_were": "host" in str(setup.plan.recompute) and setup.world.device.type == "cpu",
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
    places = []
    for host, devices in nodes.items():
        shown = [f"{count} x {name}" if facts["processes"] > 1 else name for name, count in devices.items()]
        places.append(f"{host} ({', '.join(shown)})")
    more = f" and {len(places) - SHOWN_NODES} more" if len(places) > SHOWN_NODES else ""
    unused = facts.get("workers_unused")
    reason = f" (not {unused}: the samples are in memory)" if unused else ""
    yield (
        f"{count_of(len(nodes), 'node')}: {', '.join(places[:SHOWN_NODES])}{more}; "
        f"{count_of(facts['workers'], 'data worker')} for each process{reason}"
    )
    shapes = " and ".join(str(shape) for shape in facts["inputs"]) or "no tensors"
    yield (
        f"{facts['parameters']:,} parameters, {_optimizer(facts.get('optimizer'))}, inputs {shapes}, "
        f"{count_of(facts['steps_per_epoch'], 'step')} an epoch"
    )
    if rows := facts.get("statistics"):
        yield f"batch normalisation has the statistics of {rows}, not of the whole batch as one process has"
    places = Counter(name.rpartition(".")[0] or "the model" for name in facts.get("units", ()))
    if places:
        units = ", ".join(f"{count} of {place}" for place, count in places.items())
        yield f"units: {units}, found as blocks of one class; units(model) in the task gives others"
    if size := facts.get("gathered"):
        yield (
            f"no units: all parameters are gathered at once, {format_bytes(size)} at the peak: give the task "
            "units(model), its blocks in order"
        )
    if facts.get("recomputed_at_once"):
        yield (
            "no units: recompute runs the model again as a whole, which saves no memory: give the task units(model), "
            "its blocks in order"
        )

    if facts.get("kept_where_they_were"):
        yield "recompute=host: on a CPU the host's memory is the device's, so that it saves none"


def device_name(device: torch.device) -> str:
    """Returns the GPU's model, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


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
