"""Finds learning rates: trains a task a few steps under a plan while the learning rate rises, and keeps nothing."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from grappe.errors import DivergedError, TaskError, UsageError
from grappe.fields import at_least
from grappe.language import translated_name
from grappe.plan import AnyPlan, as_plan
from grappe.task import Task, derived
from grappe.training.request import data_folder
from grappe.training.short_run import TaskProcess, short_run
from grappe.training.task_reference import TaskReference
from grappe.words import format_number

if TYPE_CHECKING:
    from grappe.step.loss import StepResult

COLUMNS, ROWS = 64, 14
DOTS = "•×+∘"
DECADES = 3
WIDTH = 0.025
"""Standard deviation of the smoothing window, as a part of the ramp."""
DIVERGED = 3.0
"""A training ends when its loss is above the best by this many times the first."""
FIRST = 5
SURE = 6.0
"""Standard errors that the loss must fall by."""
RISE = 0.1
"""Share of its fall by which the loss may rise before it counts as unstable."""
SPREAD = 10.0
"""Largest ratio of the seeds' learning rates."""
SHORT = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCurve:
    """One training's steps."""

    seed: int
    lr: tuple[float, ...]
    loss: tuple[float, ...]
    """Loss of the step's batch before the update with the step's learning rate."""
    diverged: bool
    """Whether it ended before the ramp did."""


def has_diverged(losses: Sequence[float]) -> bool:
    """Returns whether a training has diverged by its last loss."""
    *before, last = losses
    if not before or not math.isfinite(last):
        return not math.isfinite(last)
    return last > min(before) + DIVERGED * max(abs(float(np.mean(before[:FIRST]))), 1e-12)


def smoothed(values: Sequence[float], steps: int) -> np.ndarray:
    """Smooths by a Gaussian window centred on each value, so that nothing is shifted.

    An exponential moving average, which others use, lags: its steepest point is at too high a learning rate.

    Args:
        steps: of the full ramp.
    """
    width = max(1.0, WIDTH * steps)
    places = np.arange(len(values))
    weights = np.exp(-0.5 * ((places[:, None] - places[None]) / width) ** 2)
    return weights @ np.asarray(values, dtype=float) / weights.sum(1)


def noise(values: Sequence[float], steps: int) -> float:
    """The standard error of the smoothed values, from how far neighbours differ before anything is learned."""
    early = np.asarray(values[: max(8, steps // 5)], dtype=float)
    scatter = float(np.median(np.abs(np.diff(early)))) / (0.6745 * math.sqrt(2)) if len(early) > 1 else 0.0
    return scatter / math.sqrt(2 * math.sqrt(math.pi) * max(1.0, WIDTH * steps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Band:
    """Two learning rates."""

    steepest: float
    """The learning rate where the loss falls fastest."""
    largest_stable: float
    """Beyond it the loss rises again."""
    reaches_the_end: bool
    """Whether the ramp ended before that."""

    @property
    def suggested(self) -> float:
        """The middle, by ratio."""
        return math.sqrt(self.steepest * self.largest_stable)


class Advice(NamedTuple):
    """A band, or why there is none."""

    band: Band | None
    reason: str = ""


def advise(curves: Sequence[LossCurve], steps: int) -> Advice:
    """The band of all seeds together: the median of the steepest, the least of the largest stable.

    Args:
        steps: of the full ramp.
    """
    bands = []
    for curve in curves:
        band = band_of(curve, steps)
        if isinstance(band, str):
            return Advice(None, f"seed {curve.seed}: {band}")
        bands.append(band)
    for name in ("steepest", "largest_stable"):
        values = [getattr(band, name) for band in bands]
        if max(values) > SPREAD * min(values):
            what = name.replace("_", " ")
            return Advice(
                None,
                f"the seeds disagree: their {what} learning rates are {min(values):.2g} to {max(values):.2g}. "
                "Give more --steps, or a larger batch_size",
            )
    stable = min(band.largest_stable for band in bands)
    steepest = min(float(np.median([band.steepest for band in bands])), stable)
    reaches = all(band.reaches_the_end for band in bands)
    return Advice(Band(steepest=steepest, largest_stable=stable, reaches_the_end=reaches))


def band_of(curve: LossCurve, steps: int) -> Band | str:
    """One seed's band, or why it has none."""
    if len(curve.loss) < SHORT:
        lowest = curve.lr[0] if curve.lr else 0.0
        return f"it diverged within {len(curve.loss)} steps, from lr={lowest:.2g} on: give a smaller --lowest"
    values = smoothed(curve.loss, steps)
    below = np.minimum.accumulate(values)
    start = float(values[: max(3, steps // 10)].mean())
    fall = start - float(below[-1])
    if fall <= SURE * noise(curve.loss, steps) or fall <= 1e-3 * abs(start):
        end = "it diverged" if curve.diverged else "the ramp ended"
        return (
            f"the loss does not fall beyond its noise before {end} (from {start:.4g} to {below[-1]:.4g}). "
            + ("Give a smaller --lowest, more --steps" if curve.diverged else "Give a larger --highest, more --steps")
            + ", or a larger batch_size"
        )
    risen = np.flatnonzero(values > below + RISE * (start - below) + SURE * noise(curve.loss, steps))
    # What rises before anything is learned is noise.
    risen = risen[start - below[risen] > 0.5 * fall]
    end = int(risen[0]) if len(risen) else len(values)
    lowest = int(np.argmin(values[:end]))
    slopes = np.gradient(values)
    steepest = int(np.argmin(slopes[: lowest + 1]))
    return Band(
        steepest=curve.lr[steepest],
        largest_stable=curve.lr[lowest],
        reaches_the_end=not len(risen) and not curve.diverged,
    )


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
        at_least(self, 20, "steps")
        at_least(self, 1, "seeds")
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

    return derived(task, schedule=schedule)


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
    plan: AnyPlan = "",
    *,
    ramp: Ramp | None = None,
    fields: Mapping[str, object] | None = None,
    data: Path | str | None = None,
) -> LearningRates:
    """Trains the task from new weights for each seed, the learning rate rising; reads no run and writes none.

    Raises:
        GrappeError: the task, the plan or the ramp is wrong.
    """
    ramp = ramp or Ramp()
    reference = TaskReference.of(task, fields)
    chosen = as_plan(plan)
    own, is_field, curves = short_run(functools.partial(searched, ramp), reference, chosen, data_folder(data))
    return LearningRates(
        task=reference.name,
        plan=str(chosen),
        own=own,
        is_field=is_field,
        ramp=ramp,
        curves=curves,
        advice=advise(curves, ramp.steps),
    )


def searched(ramp: Ramp, process: TaskProcess) -> tuple[float, bool, tuple[LossCurve, ...]]:
    """Returns the task's own learning rate, whether it is a field, and the curves. Collective."""
    from grappe.engines.shared.state import trained_parameters
    from grappe.parallel.materialise import on_meta

    task = process.task
    own = float(task.optimizer(trained_parameters(on_meta(task))).param_groups[0]["lr"])
    ramp.ends(own)
    curves = tuple(
        _curve(process, ramp, dataclasses.replace(task, seed=task.seed + number)) for number in range(ramp.seeds)
    )
    return own, getattr(task, "lr", None) == own, curves


def _curve(process: TaskProcess, ramp: Ramp, task: Task) -> LossCurve:
    from grappe.data import loader
    from grappe.data.datasets import dataset_of
    from grappe.data.stream import head

    dataset = head(dataset_of(task, "train", process.data), ramp.steps * task.batch_size)
    batches = loader.training_loader(task, dataset, process.plan, process.world)
    rates: list[float] = []
    losses: list[float] = []

    def after(result: StepResult) -> bool:
        rates.append(float(result.lr))
        losses.append(result.sums.read()[0] / float(result.batch.count))
        return has_diverged(losses)  # alike on every process: the loss is the global batch's

    diverged = False
    with process.engine(ramped(task, ramp), batches, ramp.steps, samples=len(dataset)) as engine:
        try:
            engine.train(batches.batches(0, ramp.steps), after)
        except DivergedError:  # DeepSpeed looks at the gradient, too
            diverged = True
    steps = len(losses) - (bool(losses) and has_diverged(losses))
    return LossCurve(
        seed=task.seed, lr=tuple(rates[:steps]), loss=tuple(losses[:steps]), diverged=diverged or steps < len(losses)
    )


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
        label = format_number(value) if row % 4 == 0 or row == ROWS - 1 else ""
        yield f"{label:>9} ┤{''.join(line).rstrip()}"
    yield f"{'':>9} └{'─' * COLUMNS}"
    ends, space = (plain(low), plain(high)), COLUMNS
    axis = translated_name("learning rate", sys.stdout)
    yield f"{'':>10} {ends[0]}{axis:^{space - len(ends[0]) - len(ends[1])}}{ends[1]}"
    seeds = (
        f"{DOTS[number % len(DOTS)]} seed {curve.seed}" for number, curve in enumerate(result.curves) if curve.loss
    )
    lines = ["│ steepest, largest stable"] if result.advice.band is not None else []
    yield f"{'':>10} loss: {', '.join([*seeds, *lines])}"


def plain(rate: float) -> str:
    """Formats a learning rate by two digits, without an exponent where it is readable: 0.0001, 100, 1e-07."""
    rounded = float(f"{rate:.2g}")
    return f"{rounded:g}" if rate < 1e-5 or rate >= 1e6 else f"{rounded:.6f}".rstrip("0").rstrip(".")
