"""Finds learning rates: trains a task a few steps under a plan while the learning rate rises, and keeps nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grappe.errors import DivergedError, TaskError, UsageError
from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.plan import Plan, as_plan
from grappe.task import Task
from grappe.training.request import data_folder
from grappe.training.task_reference import TaskReference
from grappe.verbs.lr_find.advice import Advice, DivergenceTest, LossCurve, advise, smoothed

if TYPE_CHECKING:
    from grappe.launch.world import World
    from grappe.step.reduction import StepResult

COLUMNS, ROWS = 64, 14
DOTS = "•×+∘"
DECADES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ramp:
    """The rise of the learning rate of the first parameter group; the other groups keep their proportion to it."""

    kind: Literal["exponential", "linear"] = "exponential"
    """exponential: by the same factor at each step; linear: by the same amount."""
    lowest: float | None = None
    """The first learning rate. Default: a thousandth of the task's own."""
    highest: float | None = None
    """The last. Default: a thousand times the task's own."""
    steps: int = 100
    """Optimizer steps of each training."""
    seeds: int = 3
    """Trainings: of the task's seed, and of those that follow it."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 20), ("seeds", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name}={getattr(self, name)}: it must be at least {least}")
        for name in ("lowest", "highest"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"--{name}={value}: a learning rate is above 0, and finite")
        if self.lowest is not None and self.highest is not None and self.lowest >= self.highest:
            raise UsageError(
                f"--lowest={self.lowest} is not below --highest={self.highest}: exchange them, or leave one out"
            )

    def ends(self, own: float) -> tuple[float, float]:
        """The first and the last learning rate, where the task's own is `own`.

        Raises:
            TaskError: the task's own is not above 0.
            UsageError: the first is not below the last.
        """
        if not own > 0:
            raise TaskError(
                f"the optimizer's first parameter group has lr={own:g}, which nothing can be a multiple of: "
                "give it a learning rate above 0"
            )
        low = self.lowest if self.lowest is not None else own / 10**DECADES
        high = self.highest if self.highest is not None else own * 10**DECADES
        if low >= high:
            raise UsageError(f"from {low:g} to {high:g} nothing rises: give both --lowest and --highest")
        return low, high

    def at(self, step: int, own: float) -> float:
        """The learning rate of a step, from 0."""
        low, high = self.ends(own)
        part = min(step, self.steps - 1) / (self.steps - 1)
        return low * (high / low) ** part if self.kind == "exponential" else low + (high - low) * part


def ramped(task: Task, ramp: Ramp) -> Task:
    """The task with a learning rate that rises in place of its schedule; all else is the user's."""

    def schedule(self: Task, optimizer: Any, total_steps: int) -> Any:
        from torch.optim.lr_scheduler import LambdaLR

        own = float(optimizer.param_groups[0]["lr"])
        return LambdaLR(optimizer, lambda step: ramp.at(step, own) / own)

    kind = type(task)
    methods = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__annotations__": {},
        "schedule": schedule,
    }
    made = object.__new__(type(kind.__name__, (kind,), methods))
    made.__dict__.update(task.__dict__)
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class LRFindRequest:
    """A search, on its way to its processes."""

    task: TaskReference
    plan: Plan
    data: Path
    ramp: Ramp


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRates:
    """The curves, and what they say."""

    task: str
    plan: str
    own: float
    """The task's own learning rate."""
    is_field: bool
    """Whether it is the task's field `lr`."""
    ramp: Ramp
    curves: tuple[LossCurve, ...]
    advice: Advice

    def as_json(self) -> dict[str, Any]:
        """For a file, and for the report."""
        band = self.advice.band
        return {
            "kind": "lr-find",
            "task": self.task,
            "plan": self.plan,
            "own": self.own,
            "ramp": dataclasses.asdict(self.ramp),
            "curves": [dataclasses.asdict(curve) for curve in self.curves],
            "band": None if band is None else {**dataclasses.asdict(band), "suggested": band.suggested},
            "reason": self.advice.reason,
        }


def lr_find(
    task: Task | type[Task] | str,
    plan: Plan | str = "",
    *,
    ramp: Ramp | None = None,
    fields: Mapping[str, str] | None = None,
    data: Path | str | None = None,
) -> LearningRates:
    """Trains the task from new weights for each seed, the learning rate rising; reads no run and writes none.

    Raises:
        GrappeError: the task, the plan or the ramp is wrong.
    """
    ramp = ramp or Ramp()
    reference = TaskReference.of(task, fields)
    request = LRFindRequest(task=reference, plan=as_plan(plan), data=data_folder(data), ramp=ramp)
    own, is_field, curves = start("grappe.verbs.lr_find.lr_find:worker", request, request.plan)
    return LearningRates(
        task=reference.name,
        plan=str(request.plan),
        own=own,
        is_field=is_field,
        ramp=ramp,
        curves=curves,
        advice=advise(curves, ramp.steps),
    )


def worker(
    request: LRFindRequest, process: ProcessRank, rendezvous_folder: Path
) -> tuple[float, bool, tuple[LossCurve, ...]]:
    """Runs one process of a search: the task's own learning rate, whether it is a field, the curves. Collective."""
    from grappe.engines.shared.state import trained_parameters
    from grappe.errors.user_code import naming_user_line
    from grappe.launch.world import joined
    from grappe.parallel.materialise import on_meta

    task = request.task.resolve()
    own = float(task.optimizer(trained_parameters(on_meta(task))).param_groups[0]["lr"])
    request.ramp.ends(own)
    with joined(request.plan, process, rendezvous_folder) as world, naming_user_line(task):
        curves = tuple(
            _curve(request, dataclasses.replace(task, seed=task.seed + number), world)
            for number in range(request.ramp.seeds)
        )
    return own, getattr(task, "lr", None) == own, curves


def _curve(request: LRFindRequest, task: Task, world: World) -> LossCurve:
    from grappe import engines
    from grappe.checkpoint.initial import built
    from grappe.data import loader
    from grappe.data.datasets import dataset_of, prepare
    from grappe.engines.base import EngineSetup

    prepare(task, request.data, world)
    dataset = dataset_of(task, "train", request.data)
    batches = loader.training_loader(task, dataset, request.plan, world)
    setup = EngineSetup(
        task=ramped(task, request.ramp),
        plan=request.plan,
        world=world,
        weights=built(task),
        total_steps=request.ramp.steps,
        sample_inputs=batches.example(),
        samples=len(dataset),
    )
    rates: list[float] = []
    losses: list[float] = []
    is_diverged = DivergenceTest()

    def after(result: StepResult) -> bool:
        total, _ = result.sums.read()
        loss = total / float(result.batch.count)
        if is_diverged(loss):  # alike on every process: the loss is the global batch's
            rates.append(float("nan"))
            return True
        rates.append(float(result.lr))
        losses.append(loss)
        return False

    with engines.running(setup) as engine:
        try:
            engine.train(batches.batches(0, request.ramp.steps), after)
            diverged = len(rates) > len(losses)
        except DivergedError:  # DeepSpeed looks at the gradient, too
            diverged = True
    return LossCurve(seed=task.seed, lr=tuple(rates[: len(losses)]), loss=tuple(losses), diverged=diverged)


def plot(result: LearningRates) -> Iterator[str]:
    """Lines of text: the loss over the learning rate."""
    low, high = result.ramp.ends(result.own)
    logarithmic = result.ramp.kind == "exponential"

    def column(rate: float) -> int:
        part = math.log(rate / low) / math.log(high / low) if logarithmic else (rate - low) / (high - low)
        return min(COLUMNS - 1, max(0, round(part * (COLUMNS - 1))))

    curves = [(curve.lr, smoothed(curve.loss, result.ramp.steps)) for curve in result.curves if curve.loss]
    if not curves:
        return
    bottom = min(float(values.min()) for _, values in curves)
    top = max(float(values[: max(3, len(values) // 10)].max()) for _, values in curves)
    top += 0.15 * (top - bottom) or 1.0
    grid = [[" "] * COLUMNS for _ in range(ROWS)]
    if result.advice.band is not None:
        for rate in (result.advice.band.steepest, result.advice.band.largest_stable):
            for line in grid:
                line[column(rate)] = "│"
    for number, (rates, values) in enumerate(curves):
        for rate, value in zip(rates, values, strict=True):
            if value <= top:
                row = round((top - float(value)) / (top - bottom) * (ROWS - 1))
                grid[row][column(rate)] = DOTS[number % len(DOTS)]
    for row, line in enumerate(grid):
        value = top - (top - bottom) * row / (ROWS - 1)
        label = f"{value:.4g}" if row % 4 == 0 or row == ROWS - 1 else ""
        yield f"{label:>9} ┤{''.join(line).rstrip()}"
    yield f"{'':>9} └{'─' * COLUMNS}"
    ends, space = (f"{low:.2g}", f"{high:.2g}"), COLUMNS
    yield f"{'':>10} {ends[0]}{'learning rate':^{space - len(ends[0]) - len(ends[1])}}{ends[1]}"
