"""Calibrates this machine: its cores, the links between its processes, and what grappe's engine itself takes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from grappe.data.arrays import Arrays
from grappe.foresight import calibration as kept
from grappe.foresight.calibration import Calibration, Machine, Overhead
from grappe.foresight.links import LinkRequest
from grappe.foresight.machine_speed import SpeedRequest
from grappe.foresight.pipeline_time import orders_of, simulate
from grappe.foresight.sketch import Sketch
from grappe.foresight.step_time import Clock
from grappe.launch.folders import scratch
from grappe.launch.local import local, start_server
from grappe.launch.world import cores
from grappe.plan import Plan
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference

CLASSES, SAMPLES = 10, 8192
DEPTHS = (3, 10)  # units of the reference tasks: what grows between them is a unit's or an operator's
SPLIT = 2  # modules of a block that a tensor plan splits
GROUPED = 2  # blocks of a unit where units and their parameters are told apart: half as many units, as many parameters
SMALL, LARGE = 32, 384
"""Widths: of layers so small that an operator takes next to nothing, and of some whose messages are large."""
BUSY = 128
"""Width of layers that keep the cores busy for long, with small messages, by a batch of all samples."""
STEPS = 40
REPEATS = 3  # trainings, of which the median counts
MOST = 8  # processes
PLANS = (
    ("recompute", "recompute"),
    ("offload", "offload=cpu"),
    ("replicate", "replicate=2"),
    ("zero3", "shard=2"),
    ("zero1", "shard=2,zero=1"),
    ("tensor", "tensor=2"),
    ("pipeline", "pipeline=2,microbatches=4"),
    ("interleaved", "pipeline=2,microbatches=4,schedule=interleaved"),
    ("zero_bubble", "pipeline=2,microbatches=4,schedule=zero_bubble"),
)
"""Kinds of plans, and the plan by which each is measured."""


class Reference(Task):
    """Layers of which a step is mostly the engine's own time: random rows, random classes."""

    batch_size: int = SMALL
    depth: int = DEPTHS[0]
    blocks: int = 1
    width: int = SMALL

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(*(self._block() for _ in range(self.blocks))) for _ in range(self.depth))
        )

    def _block(self) -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(self.width),
            nn.Linear(self.width, self.width),
            nn.GELU(),
            nn.Linear(self.width, self.width),
        )

    def data(self, split: str, folder: Path) -> Arrays:
        draw = torch.Generator().manual_seed(0)
        return Arrays(
            torch.randn(SAMPLES, self.width, generator=draw),
            torch.randint(0, CLASSES, (SAMPLES,), generator=draw),
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named_parameters, lr=1e-3)

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.children())

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        return {"*.*.1": ColwiseParallel(), "*.*.3": RowwiseParallel()}


def calibrate(note: Callable[[str], None] = lambda line: None) -> Calibration:
    """Measures all but operators, which are run when a task needs them; keeps it, and returns it."""
    start_server(metrics=True)
    counts = sorted({2, min(cores(), MOST)} - {1}) if cores() > 1 else []
    note("cores and memory")
    threads = sorted({1, max(1, cores() // 2), cores()})
    flops, bandwidth = local("grappe.foresight.machine_speed:worker", SpeedRequest(threads=threads), 1)
    made = Calibration(machine=Machine.here(), overheads={}, links={}, flops=flops, bandwidth=bandwidth)
    for count in counts:
        note(f"messages between {count} processes")
        found = local("grappe.foresight.links:worker", LinkRequest(processes=count), count)
        made = dataclasses.replace(made, links={**made.links, str(count): found})
    made = _with_engine(made, note)
    kept.write(made)
    return made


def _with_engine(made: Calibration, note: Callable[[str], None]) -> Calibration:
    """Adds what the engine itself takes: of one process first, then what each kind of plan adds to it."""
    note("the engine's own time")
    with scratch("calibrate") as folder:
        made = dataclasses.replace(made, overheads={"one": _fitted(made, "threads=1", folder)})
        for kind, plan in PLANS:
            if Plan.parse(plan).processes <= cores():
                note(f"the engine's own time with {plan}")
                found = _added(made, kind, plan + ",threads=1", folder)
                made = dataclasses.replace(made, overheads={**made.overheads, kind: found})
    return made


def _fitted(made: Calibration, plan: str, folder: Path) -> Overhead:
    """Fits a single process's overheads: by what its phases take beyond their operators."""
    found, parsed = [], Plan.parse(plan)
    for number in range(REPEATS):
        turn = folder / f"turn-{number}"
        (small, first), (large, second) = (
            (_trained(one, parsed, turn), _Base(made, one, parsed, turn))
            for one in (Reference(depth=depth) for depth in DEPTHS)
        )
        each = {}
        for name in ("forward", "backward", "update"):
            (few, little), (many, much) = first.operators[name], second.operators[name]
            each[name] = ((large[name] - much) - (small[name] - little)) / (many - few)
        each["step"] = statistics.fmean(
            phases["step"]
            - base.data
            - sum(took + each[name] * count for name, (count, took) in base.operators.items())
            for phases, base in ((small, first), (large, second))
        )
        found.append(each)
    middle = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return Overhead(**{**middle, "step": max(0.0, middle["step"])})


def _added(made: Calibration, kind: str, plan: str, folder: Path) -> Overhead:
    """Fits what a kind of plan adds to a single process's engine, for each unit, parameter and step."""
    none = dataclasses.replace(made, overheads={"one": made.overheads["one"]})

    def beyond(depth: int, **sizes: int) -> _Beyond:
        return _beyond(none, Reference(depth=depth, **sizes), plan, folder)

    if Plan.parse(plan).pipeline > 1:
        return _of_passes(beyond, Plan.parse(plan))
    few, many = (beyond(depth) for depth in DEPTHS)
    sizes = [
        {"replicate": one.parameters, "tensor": SPLIT * one.depth}.get(kind, one.depth) for one in (few, many)
    ]
    each = max(0.0, (many.step - few.step) / (sizes[1] - sizes[0]))
    if kind == "recompute":
        return Overhead(unit=each)
    step = max(0.0, few.step - each * sizes[0])
    update = (many.update - few.update) / (many.operators - few.operators)
    if kind == "tensor":
        return Overhead(step=step, update=update, unit=each)
    large = beyond(DEPTHS[1], width=LARGE, batch_size=LARGE)
    if kind == "replicate":
        slowed = large.slowed(step + each * large.parameters)
        return Overhead(step=step, update=update, parameter=each, messages=slowed)
    grouped = beyond(DEPTHS[1] // GROUPED, blocks=GROUPED)
    busy = beyond(DEPTHS[0], width=BUSY, batch_size=SAMPLES)
    unit = min(each, max(0.0, (many.step - grouped.step) / (many.depth - grouped.depth)))
    more = max(0.0, (busy.step - step) / busy.depth - each)
    share = min(1.0, large.computing / large.depth / (busy.computing / busy.depth))
    return Overhead(
        step=step,
        unit=unit,
        update=update,
        parameter=(each - unit) * many.depth / many.parameters,
        busy=more,
        busy_from=busy.computing / busy.depth,
        messages=large.slowed(step + large.depth * (each + share * more)),
    )


def _of_passes(beyond: Callable[..., _Beyond], plan: Plan) -> Overhead:
    """Fits what a pass of a stage takes beyond its operators, of those on the longest way through a pipeline."""
    orders = orders_of(plan)
    passes = simulate(orders, lambda kind, stage: 1.0, lambda stage: 0.0).seconds
    kinds = len({(kind, stage) for order in orders for kind, stage, _ in order})
    few = beyond(DEPTHS[1])
    some, many = (beyond(DEPTHS[1], width=BUSY, batch_size=SAMPLES // part) for part in (8, 2))
    # The lower of two: what other programs take makes it longer, never shorter.
    unit = max(0.0, min(few.step, some.step) / passes)
    return Overhead(
        unit=unit,
        busy=max(0.0, many.step / passes - unit),
        busy_after=some.computing / kinds,
        busy_from=many.computing / kinds,
    )


def sentences(made: Calibration) -> list[str]:
    """Says what was measured, and where it is kept."""
    flops = ", ".join(f"{name}: {value / 1e9:.0f} GFLOP/s" for name, value in made.flops.items())
    bandwidth = ", ".join(f"{name}: {value / 1e9:.0f} GB/s" for name, value in made.bandwidth.items())
    lines = [
        f"a large matrix product, by precision and threads: {flops}",
        f"memory, read and written, by threads: {bandwidth}",
    ]
    for count, collectives in made.links.items():
        small, large = collectives["all_reduce"][0], collectives["all_reduce"][-1]
        lines.append(
            f"a sum over {count} processes: {1e3 * small[1]:.2f} ms for {small[0]:.0f} bytes, "
            f"{1e3 * large[1]:.0f} ms for {large[0] / 1e6:.0f} MB"
        )
    return [*lines, f"kept in {kept.file_here()}; grappe foresee now says times, too"]


class _Beyond(NamedTuple):
    """Seconds that a reference training takes beyond what is foreseen of it without the engine's own time."""

    depth: int
    parameters: int
    step: float
    """Without the update."""
    update: float
    operators: float
    """Number of the update's."""
    computing: float
    """Of forward and backward."""
    messages: float
    """Foreseen of its messages by themselves."""

    def slowed(self, engine: float) -> float:
        """Computes by what factor messages take longer than by themselves, of what the engine leaves of the seconds."""
        return max(1.0, 1 + (self.step - engine) / self.messages) if self.messages else 1.0


def _beyond(made: Calibration, task: Reference, plan: str, folder: Path) -> _Beyond:
    """Trains a reference task several times: its processes are 5 to 10 % quicker or slower at each start."""
    parsed = Plan.parse(plan)
    several = [_trained(task, parsed, folder / f"turn-{number}") for number in range(REPEATS)]
    phases = sorted(several, key=lambda one: one["step"])[REPEATS // 2]
    base = _Base(made, task, parsed, folder)
    operators, kernels = base.operators["update"]
    return _Beyond(
        depth=task.depth,
        parameters=base.parameters,
        step=phases["step"] - phases["update"] - (base.total - base.updated),
        update=phases["update"] - kernels,
        operators=operators,
        computing=base.operators["forward"][1] + base.operators["backward"][1],
        messages=base.messages,
    )


class _Base:
    """Seconds that are foreseen of a reference training without the engine's own time."""

    def __init__(self, made: Calibration, task: Reference, plan: Plan, folder: Path) -> None:
        sketch = Sketch(task, folder, records=True)
        clock = Clock(sketch, made)
        names = ("forward", "backward", "update")
        self.operators = dict(zip(names, clock.operators(plan), strict=True))
        self.data = sketch.batches.seconds(task.batch_size)
        foreseen = clock.of(plan)
        self.total, self.updated = foreseen.total, clock.updated(plan)
        self.messages = foreseen.communication
        self.parameters = len(sketch.parameters)


def _trained(task: Reference, plan: Plan, folder: Path) -> dict[str, float]:
    """Trains a reference task for some steps; returns its median seconds by phase, and of a step."""
    sizes = (task.depth, task.blocks, task.width, task.batch_size)
    name = "-".join(map(str, (*sizes, *sorted(plan.changed_keys()), plan.zero, plan.schedule)))
    request = Request(
        task=TaskReference.of(task),
        plan=plan,
        base=folder,
        run=folder / name,
        quiet=True,
        options=Options(steps=STEPS, steps_only=True),
    )
    local("grappe.training.worker:worker", request, plan.processes)
    timing = Run(folder / name).read_description()["costs"][0]["timing"]
    phases = {name: values["median"] for name, values in timing["phases"].items()}
    return {**phases, "step": timing["step"]["median"]}
