"""grappe measure --why: traces a short training of each measured plan, breaks its time down, and lists remedies."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.table import Table

from grappe.contrib.lab.breakdown import (
    SMALL_BATCH,
    USEFUL,
    ProcessTrace,
    Remedy,
    RunTrace,
    TimeBreakdown,
    break_down,
    remedies,
)
from grappe.contrib.lab.operators import OperatorTrace, measure_dispatch
from grappe.errors import GrappeError
from grappe.language import translated_line
from grappe.launch import files
from grappe.launch.files import IN_RUN, scratch
from grappe.launch.rank import ProcessRank
from grappe.launch.world import choose_device
from grappe.plan import Plan
from grappe.profiling.phases import BACKWARD, CHECKPOINT, EVALUATION, FORWARD, PHASES, WARMUP
from grappe.sites.advice import unfit_precision
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.run import Run
from grappe.training.short_run import short_training
from grappe.training.task_reference import TaskReference
from grappe.training.watchers.base import ClockWatcher, Outcome, Record
from grappe.verbs.measure import flops
from grappe.verbs.measure.points import Measurement, MeasureOptions
from grappe.verbs.measure.verdict import LEAST
from grappe.words import first_line, plain_table, plan_name

TRACED_STEPS = 5
SENTENCES = 3
UNTRACED_STEPS = 6  # of the same process, before the trace
PERIOD = WARMUP + UNTRACED_STEPS + 1
"""Steps to the first evaluation and save, which warm up; as many follow, with the trace, to the second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The parts of a measured plan's time, and what would make it faster."""

    plan: str
    batch: int
    breakdown: TimeBreakdown | None = None
    remedies: tuple[Remedy, ...] = ()
    """The largest saving first."""
    failure: str = ""
    """The reason why the steps could not be traced."""

    def as_json(self) -> dict[str, Any]:
        """Converts it to JSON, for files and for the report."""
        content: dict[str, Any] = {"plan": self.plan, "batch": self.batch}
        breakdown = self.breakdown
        if breakdown is None:
            return {**content, "failure": self.failure}
        return {
            **content,
            "seconds": breakdown.seconds,
            "parts": {part: breakdown.share(part) for part in breakdown.parts},
            "remedies": [{**dataclasses.asdict(remedy), "gain": remedy.gain} for remedy in self.remedies],
            "evaluate_every": breakdown.evaluate_every,
            "save_every": breakdown.save_every,
            "reachable": dict(breakdown.trace.reachable),
            "operators": [
                None if process.operators is None else dataclasses.asdict(process.operators)
                for process in breakdown.trace.processes
            ],
        }


def explain(
    task: Task | type[Task] | str,
    points: Sequence[Measurement],
    *,
    options: MeasureOptions | None = None,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> list[Explanation]:
    """Explains where the time of measured plans goes, by a short training of each whose operators are traced.

    Args:
        points: from `measure`; those that were asked for, and did not fail, are explained.
        options: those that `points` were measured with.
    """
    options = options or MeasureOptions()
    request = Request(task=TaskReference.of(task, fields), plan=Plan(), data=data_folder(data))
    epochs = max(request.task.resolve().epochs, 2 * PERIOD)  # an epoch may be a step
    explanations = []
    with scratch("why") as folder:
        for number, point in enumerate(points):
            if point.origin != "asked" or point.failure:
                continue
            note(f"tracing {plan_name(point.plan)}, batch {point.batch}")
            training = dataclasses.replace(
                request,
                task=request.task.with_values(batch_size=point.batch, epochs=epochs),
                plan=Plan.parse(point.plan),
                options=Options(steps=2 * PERIOD, evaluate_every=PERIOD, save_every=PERIOD, no_check=True),
                per_process_watchers=(TraceWatcher(),),
            )
            try:
                trace: RunTrace = short_training(training, folder / str(number), traces)
            except GrappeError as error:
                explanations.append(Explanation(plan=point.plan, batch=point.batch, failure=first_line(error)))
                continue
            epoch = trace.processes[0].steps_per_epoch
            breakdown = break_down(point, trace, options.evaluate_every or epoch, options.save_every or epoch)
            helpful = tuple(remedies(breakdown, point, points))
            explanations.append(Explanation(plan=point.plan, batch=point.batch, breakdown=breakdown, remedies=helpful))
    return explanations


def traces(run: Run, request: Request, process: ProcessRank) -> RunTrace:
    """Reads what the processes of a training have traced, and measures this one's device."""
    plan = request.plan
    texts = (files.read_text(_trace_file(run.folder, rank)) for rank in range(plan.processes))
    return RunTrace(
        processes=tuple(msgspec.json.decode(text, type=ProcessTrace) for text in texts),
        reachable=reachable(choose_device(plan, process), plan),
    )


def _trace_file(run: Path, rank: int) -> Path:
    return run / f"operators-{rank}.json"


def reachable(device: Any, plan: Plan) -> dict[str, float]:
    """Measures FLOP/s of a large matrix product in each precision that the device has units for."""
    precisions = ["fp32", "bf16"]
    if device.type == "cuda":
        gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        rocm = torch.version.hip
        candidates = ("fp32", "bf16", "fp16") if rocm else ("fp32", "tf32", "bf16", "fp16")
        precisions = [name for name in candidates if unfit_precision(name, gpu, None if rocm else capability) is None]
    if plan.precision == "fp64":  # chosen for its accuracy: a quicker one is no advice
        precisions = []
    names: dict[Any, None] = dict.fromkeys([*precisions, plan.precision])
    return {name: flops.reachable(device, dataclasses.replace(plan, precision=name)) for name in names}


class TraceWatcher(ClockWatcher):
    """Watcher on every process that traces steps after the first evaluation, and writes what they took to a file."""

    prompt = True  # a trace begins and ends between two steps

    def __init__(self) -> None:
        self._steps = 0
        self._untraced: list[tuple[int, list[float]]] = []
        self._before = [0.0] * len(PHASES)
        self._dispatch = 0.0
        self._trace: OperatorTrace | None = None
        self._info: Any = None

    def started(self, info: Any) -> None:
        self._info = info

    def stepped(self, record: Record) -> None:
        self._steps += 1
        if WARMUP <= self._steps <= PERIOD:
            self._untraced.append(self.chronometer.spent())
        traced_steps = self._steps - PERIOD - 1
        if traced_steps == 0:
            self._before = self.chronometer.spent()[1]
            self._dispatch = measure_dispatch(self.chronometer)
            self._trace = OperatorTrace(self.chronometer, on_gpu=self._info.device == "cuda")
            self._trace.__enter__()
        elif self._trace is not None and traced_steps > 0:
            self._trace.end_step()
            if traced_steps == TRACED_STEPS:
                self._trace.__exit__(None, None, None)

    def ended(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        totals = outcome.timing.totals
        sizes = [(name, tensor.numel() * tensor.element_size()) for name, tensor in self.chronometer.parameters]
        trace = ProcessTrace(
            operators=None if self._trace is None else self._trace.totals(self._dispatch),
            computing=_median_step(self._untraced, FORWARD) + _median_step(self._untraced, BACKWARD),
            evaluation=totals[PHASES[EVALUATION]] - self._before[EVALUATION],
            checkpoint=totals[PHASES[CHECKPOINT]] - self._before[CHECKPOINT],
            gradients=sum(size for _, size in sizes),
            largest=max(sizes, key=lambda size: size[1], default=("", 0)),
            steps_per_epoch=self._info.steps_per_epoch,
        )
        files.replace(_trace_file(self._info.folder, self._info.rank), msgspec.json.encode(trace), IN_RUN)


def _median_step(marks: Sequence[tuple[int, Sequence[float]]], phase: int) -> float:
    """Returns a phase's median seconds of a step, from the steps and the seconds so far at several moments."""
    steps = [
        (after[phase] - before[phase]) / (last - first)
        for (first, before), (last, after) in itertools.pairwise(marks)
        if last > first
    ]
    return statistics.median(steps) if steps else 0.0


def explained(explanations: Sequence[Explanation]) -> Iterator[Table | str]:
    """Yields, for each plan, the table of its time's parts, and the largest gains in words."""
    for explanation in explanations:
        title = f"{plan_name(explanation.plan)} (batch {explanation.batch})"
        breakdown = explanation.breakdown
        if breakdown is None:
            yield f"{title}: its steps could not be traced: {explanation.failure}"
            continue
        yield ""
        yield breakdown_table(breakdown, explanation.remedies, title)
        helpful = [remedy for remedy in explanation.remedies if remedy.saves]
        if not helpful:
            yield f"{title}: nothing was found that would bring much"
        for number, remedy in enumerate(helpful[:SENTENCES]):
            share = "" if remedy.part == SMALL_BATCH else f" {breakdown.share(remedy.part):.0%}"
            part, word, gain = (_shown(text) for text in (remedy.part, remedy.word, remedy.speed_up))
            yield f"{'then' if number else 'first'}: {part}{share}: {word} ({gain})"


def _shown(text: str) -> str:
    return translated_line(text, sys.stdout)


def breakdown_table(breakdown: TimeBreakdown, remedies: Sequence[Remedy], title: str) -> Table:
    """Makes the table of a step's parts: shares that add up to 100 %."""
    heading = f"{title}, {breakdown.seconds * 1e3:.4g} ms a step"
    rows = plain_table(heading, "share", "what moves it", "gain")
    by_part = {remedy.part: remedy for remedy in remedies}
    rest = 0.0
    for part in breakdown.parts:
        share = breakdown.share(part)
        if share < LEAST and part != USEFUL:
            rest += share
            continue
        name = f"{USEFUL}, at the rate of {breakdown.precision}" if part == USEFUL else part
        remedy = by_part.get(part, Remedy(part=part, word=""))
        rows.add_row(_shown(name), f"{share:.1%}", remedy.word, remedy.speed_up)
    if rest:
        rows.add_row("less than that, together", f"{rest:.1%}", "", "")
    return rows
