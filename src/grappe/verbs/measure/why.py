"""grappe measure --why: a waterfall of each measured plan, and the remedies for its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe.errors import GrappeError
from grappe.launch.folders import scratch
from grappe.plan import Plan
from grappe.task import Task
from grappe.training.request import Request, data_folder
from grappe.training.task_reference import TaskReference
from grappe.verbs.measure.measure import measure, with_fields
from grappe.verbs.measure.measure import point as point_of
from grappe.verbs.measure.options import MeasureOptions
from grappe.verbs.measure.points import Point
from grappe.verbs.measure.remedies import Remedy, as_tried, remedies, to_try
from grappe.verbs.measure.traced import HALF, Traces, traced
from grappe.verbs.measure.waterfall import Every, Waterfall, waterfall


@dataclasses.dataclass(frozen=True, kw_only=True)
class Why:
    """The reasons why a plan has the speed that it has."""

    plan: str
    batch: int
    waterfall: Waterfall | None = None
    remedies: tuple[Remedy, ...] = ()
    """The largest saving first."""
    failure: str = ""
    """The reason why the steps could not be traced."""


def why(
    task: Task | type[Task] | str,
    points: Sequence[Point],
    *,
    options: MeasureOptions | None = None,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> list[Why]:
    """Finds where the time of measured points goes: a short training of each plan, whose operators are traced.

    Where another precision promises a gain, one more training tries it.

    Args:
        points: from `measure`; those that were asked for, and did not fail, are split.
        options: those that `points` were measured with.
    """
    options = options or MeasureOptions()
    request = Request(task=TaskReference.of(task, fields), plan=Plan(), data=data_folder(data))
    found = []

    def tried(plan: Plan, batch: int) -> Sequence[Point]:
        one = dataclasses.replace(options, repeats=1, batch_size=(batch,), weak=False)
        try:
            return measure(task, (plan,), options=one, advise=False, data=data, fields=fields, note=note)
        except GrappeError as error:
            why_not = str(error).removeprefix(
                "nothing could be measured: "
            )  # as measure() says of its only plan
            return [point_of(plan, batch, (), why_not, "advice")]

    with scratch("why") as folder:
        for number, point in enumerate(points):
            if point.origin == "asked" and not point.failure:
                note(f"tracing {point.plan or 'one process'}, batch {point.batch}")
                found.append(_one(request, point, points, options, folder / str(number), tried))
    return found


def _one(
    request: Request,
    point: Point,
    points: Sequence[Point],
    options: MeasureOptions,
    folder: Path,
    tried: Callable[[Plan, int], Sequence[Point]],
) -> Why:
    epochs = max(request.task.resolve().epochs, 2 * HALF)  # an epoch may be a step
    training = dataclasses.replace(
        request, task=with_fields(request.task, batch_size=point.batch, epochs=epochs)
    )
    try:
        traces = traced(training, Plan.parse(point.plan), folder)
    except GrappeError as error:
        return Why(plan=point.plan, batch=point.batch, failure=str(error).splitlines()[0])
    fall = waterfall(point, traces, _every(options, traces))
    plan = to_try(fall)
    if plan is not None and (str(plan), point.batch) not in {(one.plan, one.batch) for one in points}:
        points = [*points, *tried(plan, point.batch)]
    return Why(
        plan=point.plan,
        batch=point.batch,
        waterfall=as_tried(fall, point, points),
        remedies=tuple(remedies(fall, point, points)),
    )


def _every(options: MeasureOptions, traces: Traces) -> Every:
    epoch = traces.steps_per_epoch
    return Every(evaluation=options.evaluate_every or epoch, save=options.save_every or epoch)


def as_json(one: Why) -> dict[str, Any]:
    """Converts it to JSON, for files and for the report."""
    known: dict[str, Any] = {"plan": one.plan, "batch": one.batch}
    fall = one.waterfall
    if fall is None:
        return {**known, "failure": one.failure}
    return {
        **known,
        "seconds": fall.seconds,
        "parts": {part: fall.share(part) for part in fall.parts},
        "remedies": [{**dataclasses.asdict(remedy), "gain": remedy.gain} for remedy in one.remedies],
        "evaluate_every": fall.every.evaluation,
        "save_every": fall.every.save,
        "reachable": dict(fall.traces.reachable),
        "operators": [
            None if seen.traced is None else dataclasses.asdict(seen.traced) for seen in fall.traces.processes
        ],
    }
