"""The time of a run's step: what it measured, and what is foreseen from a calibration or its GPU's data sheet."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grappe.checkpoint.commit import json_hash
from grappe.errors import UsageError
from grappe.plan import Plan

if TYPE_CHECKING:
    from grappe.foresight.calibration import Calibration
    from grappe.foresight.fabric import Fabric
    from grappe.foresight.sketch import Sketch
    from grappe.foresight.step_time import StepTime

LEAST_STEPS = 5  # in a median, of which less says little
RUN_SECONDS = 20.0  # for running operators that the calibration lacks: what traces may take a minute
CALIBRATION, DATA_SHEET = "calibration", "data sheet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeSource:
    """Source from which the times of a run can be foreseen: one of both."""

    calibration: Calibration | None = None
    fabric: Fabric | None = None
    """The GPUs, as their data sheet has them."""

    @property
    def kind(self) -> str:
        """Returns CALIBRATION or DATA_SHEET."""
        return CALIBRATION if self.fabric is None else DATA_SHEET

    @property
    def key(self) -> str:
        """Identifies what was measured, or the data sheet: another one foresees other times."""
        if self.fabric is not None:
            return json_hash(dataclasses.asdict(self.fabric))
        assert self.calibration is not None
        # Operators are added whenever a task needs them; the others keep their times.
        return json_hash(dataclasses.asdict(dataclasses.replace(self.calibration, operators={})))


def time_source(known: Mapping[str, Any]) -> tuple[TimeSource | None, str]:
    """Finds what a run's times can be foreseen from; or None, and why there is nothing.

    Args:
        known: the run's description.
    """
    costs = costs_of(known)
    if known.get("device") == "cuda":
        from grappe.foresight.devices import device_reported
        from grappe.foresight.fabric import Fabric

        name = str(costs[0].get("device") or known.get("processor")) if costs else ""
        device = device_reported(name)
        if device is None:
            return None, "no data sheet of their GPU is known here"
        nodes = [one.get("host") for one in costs]
        return TimeSource(fabric=Fabric(device=device, node=max(nodes.count(one) for one in nodes))), ""
    from grappe.verbs.foresee.times import calibrated_here

    try:
        calibration = calibrated_here()
    except UsageError as error:
        return None, str(error)
    made, versions = calibration.machine, known.get("versions")
    cores = sum(one["cores"] for one in costs if isinstance(one.get("cores"), int))
    torch = versions.get("torch") if isinstance(versions, Mapping) else None
    same = (
        str(known.get("processor")).startswith(f"{made.processor}, ")
        and (cores, torch) == (made.cores, made.torch)
        and len({str(one.get("host")) for one in costs}) == 1
    )
    if not same:
        return None, "they ran on another processor, number of cores or torch than the calibration is of"
    return TimeSource(calibration=calibration), ""


def step_measured(known: Mapping[str, Any]) -> float | None:
    """Returns the median seconds of a step, of the slowest process; None: too few steps were measured."""
    found = []
    for one in costs_of(known):
        timing = one.get("timing")
        timing = timing if isinstance(timing, Mapping) else {}
        step, steps = timing.get("step"), timing.get("steps")
        median = seconds(step.get("median")) if isinstance(step, Mapping) else None
        if median is None or not isinstance(steps, int) or steps < LEAST_STEPS:
            return None
        found.append(median)
    return max(found, default=None)


def step_foreseen(sketch: Sketch, plan: Plan, source: TimeSource) -> StepTime:
    """Foresees a step in a process that traces; operators that the calibration lacks are run, and added to it.

    Raises:
        GrappeError: the plan's time is not foreseen.
    """
    if source.fabric is not None:
        from grappe.foresight.gpu_time import gpu_time

        return gpu_time(sketch, plan, source.fabric)
    from grappe.foresight.step_time import Clock
    from grappe.launch.local import start_server

    assert source.calibration is not None
    start_server(metrics=False)  # operators run in processes that have no OpenMP threads of their parents
    clock = Clock(sketch, source.calibration, RUN_SECONDS)
    found = clock.of(plan)
    with contextlib.suppress(OSError):  # they are run anew the next time
        clock.keep()
    return found


def costs_of(known: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Returns what each process of a run has measured; of a damaged description, nothing."""
    costs = known.get("costs")
    return [one for one in costs if isinstance(one, dict)] if isinstance(costs, list) else []


def seconds(value: object) -> float | None:
    """Reads a number of seconds above 0 from JSON that may be anyone's; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return float(value)
