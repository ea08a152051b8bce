"""Foresees the time of plans' steps: on this machine from its calibration, on a site's GPUs from their data sheet."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from grappe.errors import GrappeError, TaskError, UsageError
from grappe.foresight import calibration as kept
from grappe.foresight.calibration import Calibration
from grappe.foresight.devices import device_named
from grappe.foresight.fabric import Fabric
from grappe.foresight.gpu_time import gpu_time
from grappe.foresight.partition import threads_of
from grappe.foresight.search import Foreseen
from grappe.foresight.sketch import Sketch
from grappe.foresight.step_time import Clock, StepTime
from grappe.launch.world import cores
from grappe.plan import Plan
from grappe.verbs.foresee.table import reason

if TYPE_CHECKING:
    from grappe.sites.schema import Site

T = TypeVar("T")
Aim = Literal["fastest", "cheapest", "smallest"]
REFERENCE = "V100, 16 GB"
"""The GPU that a model is compared with where no site is named: the slowest that sites have."""
CLOSE = 0.1  # of a time: a sixth of what is foreseen is further off
BUSY = 0.3  # of a step, below which a GPU is not worth its queue
UNCALIBRATED = "times are not foreseen before this machine is measured, once: grappe doctor --calibrate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a training under a plan, of its steps alone."""

    samples_per_second: float
    hours: float
    """Of all the task's epochs."""
    unit_hours: float
    """Of all cores, or of all GPUs."""
    kwh: float | None = None
    """Of the GPUs, at the most power that their data sheet says; None: not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """A foreseen plan with its time."""

    foreseen: Foreseen
    time: StepTime | None = None
    cost: Cost | None = None
    why: str = ""
    """The reason why there is no time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Times of several plans."""

    plans: tuple[Timed, ...]
    gpu: str = ""
    """The GPU that they are of; "": this machine's cores."""
    notes: tuple[str, ...] = ()


def timed(sketch: Sketch, found: Sequence[Foreseen], site: Site | None) -> Times:
    """Adds times to foreseen plans; operators that this machine's calibration lacks are run.

    Args:
        sketch: made with `records`.

    Raises:
        TaskError: the task cannot be traced.
    """
    if site is not None:
        return _on_gpu(sketch, found, site)
    try:
        clock = Clock(sketch, calibrated_here())
    except UsageError as error:
        return Times(plans=tuple(Timed(foreseen=one) for one in found), notes=(str(error),))
    plans = [_timed(one, sketch, clock.of, None) for one in found]
    notes = _whys(plans)
    # Plans that are too many for this machine are asked about in seconds: then nothing is run.
    verdict = gpu_or_not(clock, sketch) if any(one.time is not None for one in plans) else None
    try:
        clock.keep()
    except OSError as error:
        notes.append(
            f"{kept.file_here()} cannot be written ({error.strerror}): operators are run anew each time"
        )
    return Times(plans=tuple(plans), notes=(*notes, *([verdict] if verdict else [])))


def gpu_or_not(clock: Clock, sketch: Sketch, name: str = REFERENCE) -> str | None:
    """Says whether a GPU is worth while for this task, compared with this machine's cores; None: it is not known."""
    device = device_named(name)
    assert device is not None
    try:
        on_gpu, here = gpu_time(sketch, Plan(), Fabric(device=device)), clock.of(Plan())
    except GrappeError:
        return None
    assert on_gpu.busy is not None
    share, faster = min(1.0, on_gpu.busy / on_gpu.compute), here.total / on_gpu.total
    low, high = faster * (1 - on_gpu.spread), faster * (1 + on_gpu.spread)
    many = f"{cores()} cores here" if cores() > 1 else "one core here"
    what = f"this model keeps one {device.title} {share:.0%} busy"
    if high < 1:
        verdict = f"the {many} are {1 / faster:.1f} times as fast, and start sooner: take no GPU"
    elif low > 1 and share >= BUSY:
        verdict = f"it is {_times(low)} to {_times(high)} times as fast as the {many}: take a GPU"
    elif low > 1:
        verdict = (
            f"it is {_times(low)} to {_times(high)} times as fast as the {many}, and mostly waits for its host: a "
            "larger batch_size uses it better; several trainings can share it (per_device)"
        )
    else:
        verdict = (
            f"it is {_times(low)} to {_times(high)} times as fast as the {many}: try both (grappe measure)"
        )
    return f"a GPU or not: {what}; {verdict}. From its data sheet, not measured on one"


def best(times: Times, aim: Aim) -> Timed | None:
    """Chooses the plan that is best under an aim, of those that fit as far as is known; None: nothing is known.

    Of plans whose times are closer than those are known, it is the plainest.
    """
    known = [one for one in times.plans if is_known(one, aim) and one.foreseen.fits is not False]
    if aim == "smallest" or not known:
        return min(known, key=lambda one: merit(one, aim), default=None)
    return plainest(known, lambda one: merit(one, aim), lambda one: one.foreseen.plan)


def plainest(known: Sequence[T], cost: Callable[[T], float], plan: Callable[[T], str]) -> T:
    """Chooses, of those that cost at most CLOSE more than the cheapest, that of fewest processes, then microbatches."""

    def order(one: T) -> tuple[int, int, float]:
        parsed = Plan.parse(plan(one))
        return parsed.processes, parsed.microbatches, cost(one)

    least = min(map(cost, known))
    return min((one for one in known if cost(one) <= least * (1 + CLOSE)), key=order)


def is_known(one: Timed, aim: Aim) -> bool:
    """Returns whether what a plan costs under an aim is known."""
    if aim != "smallest":
        return one.time is not None
    return one.foreseen.needs is not None and one.foreseen.needs.most is not None


def merit(one: Timed, aim: Aim) -> float:
    """Returns what a plan costs under an aim, the least being best: hours, hours of all cores or GPUs, or bytes."""
    if aim == "smallest":
        assert one.foreseen.needs is not None and one.foreseen.needs.most is not None
        return float(one.foreseen.needs.most)
    assert one.cost is not None
    return one.cost.unit_hours if aim == "cheapest" else one.cost.hours


def _on_gpu(sketch: Sketch, found: Sequence[Foreseen], site: Site) -> Times:
    node = site.node
    device = None if node is None else device_named(node.gpu)
    if node is None or device is None:
        why = f"{site.name}: no data sheet of its GPU is known here, so times are not foreseen"
        return Times(plans=tuple(Timed(foreseen=one) for one in found), notes=(why,))
    fabric = Fabric(device=device, node=node.gpus, network_gbit=node.network_gbit)
    plans = [
        _timed(
            one,
            sketch,
            lambda plan, batch: gpu_time(sketch, plan, fabric, batch=batch),
            device.watts,
        )
        for one in found
    ]
    of = f"{device.title} ({device.source})"
    note = f"times are from the data sheet of {of}: not calibrated, take them as half to twice"
    return Times(plans=tuple(plans), gpu=device.title, notes=(*_whys(plans), note))


def _whys(plans: Sequence[Timed]) -> list[str]:
    """Says why plans have no time: each reason once, with the first plan that it holds for."""
    first = {one.why: one.foreseen.plan for one in reversed(plans) if one.why}
    return [reason(plan, why) for why, plan in reversed(first.items())]


def calibrated_here() -> Calibration:
    """Reads this machine's calibration.

    Raises:
        UsageError: there is none, or none of this machine; the message says what to do.
    """
    file = kept.file_here()
    try:
        found = _calibration(file, file.stat().st_mtime_ns)
    except FileNotFoundError:
        found = None
    except UsageError as error:
        raise UsageError(f"times are not foreseen: {error}") from error
    if found is None:
        raise UsageError(UNCALIBRATED)
    return found


@functools.lru_cache(maxsize=1)
def _calibration(file: Path, changed: int) -> Calibration | None:
    """Reads a calibration, of some megabytes, once until it is `changed`."""
    return kept.read(file)


def _timed(
    one: Foreseen, sketch: Sketch, foresee: Callable[[Plan, int], StepTime], watts: float | None
) -> Timed:
    if one.needs is None:
        return Timed(foreseen=one)
    plan = Plan.parse(one.plan)
    try:
        time = foresee(plan, one.batch)
    except TaskError:
        raise
    except GrappeError as error:
        return Timed(foreseen=one, why=str(error))
    return Timed(foreseen=one, time=time, cost=_cost(one, plan, time, sketch, watts))


def _cost(one: Foreseen, plan: Plan, time: StepTime, sketch: Sketch, watts: float | None) -> Cost:
    batch = min(one.batch, sketch.samples)
    steps = sketch.task.epochs * math.ceil(sketch.samples / batch)
    hours = steps * time.total / 3600
    units = hours * plan.processes * (1 if watts is not None else threads_of(plan))
    return Cost(
        samples_per_second=batch / time.total,
        hours=hours,
        unit_hours=units,
        kwh=None if watts is None else units * watts / 1000,
    )


def _times(factor: float) -> str:
    return f"{factor:.1f}" if factor < 10 else f"{factor:.0f}"
