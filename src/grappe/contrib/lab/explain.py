"""grappe measure --why: traces a short training of each measured plan, breaks its time down, and lists remedies."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.table import Table

from grappe.contrib.lab.breakdown import USEFUL, TimeBreakdown, TracedRun, break_down
from grappe.contrib.lab.operators import LineCost, OperatorTrace
from grappe.errors import GrappeError
from grappe.language import translated_line
from grappe.launch import files
from grappe.launch.files import IN_RUN, scratch
from grappe.launch.rank import ProcessRank
from grappe.launch.world import choose_device
from grappe.plan import Plan
from grappe.profiling.phases import WARMUP
from grappe.sites.advice import unfit_precision
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.run import Run
from grappe.training.short_run import short_training
from grappe.training.task_reference import TaskReference
from grappe.training.watchers.base import ClockWatcher, Outcome, Record
from grappe.verbs.measure import flops
from grappe.verbs.measure.points import Measurement
from grappe.words import first_line, plain_table, plan_name

TRACED_STEPS = 5
CPUINFO = Path("/proc/cpuinfo")


def explain(
    task: Task | type[Task] | str,
    points: Sequence[Measurement],
    *,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> list[TimeBreakdown]:
    """Explains where the time of measured plans goes, by a short training of each whose operators are traced.

    Args:
        points: from `measure`; those that were asked for, and did not fail, are explained.
    """
    reference, options = TaskReference.of(task, fields), Options(steps=WARMUP + TRACED_STEPS, steps_only=True)
    breakdowns = []
    with scratch("why") as folder:
        for number, point in enumerate(points):
            if point.origin != "asked" or point.failure:
                continue
            note(f"tracing {plan_name(point.plan)}, batch {point.batch}")
            training = Request(
                task=reference.with_batch(point.batch, 1),
                plan=Plan.parse(point.plan),
                data=data_folder(data),
                options=options,
                per_process_watchers=(TraceWatcher(),),
            )
            try:
                trace = short_training(training, folder / str(number), traces)
            except GrappeError as error:
                breakdowns.append(TimeBreakdown(plan=point.plan, batch=point.batch, failure=first_line(error)))
            else:
                breakdowns.append(break_down(point, trace, points))
    return breakdowns


def traces(run: Run, request: Request, process: ProcessRank) -> TracedRun:
    """Reads what the processes of a training have traced, and measures this one's device."""
    texts = (files.read_text(_trace_file(run.folder, rank)) for rank in range(request.plan.processes))
    return TracedRun(
        processes=tuple(msgspec.json.decode(text, type=tuple[LineCost, ...]) for text in texts),
        reachable=reachable_by_precision(choose_device(request.plan, process), request.plan),
    )


def _trace_file(run: Path, rank: int) -> Path:
    return run / f"operators-{rank}.json"


def reachable_by_precision(device: torch.device, plan: Plan) -> dict[str, float]:
    """Measures FLOP/s of a large matrix product in each precision that the device has units for."""
    emulated = CPUINFO.exists() and "bf16" not in CPUINFO.read_text()  # some fifty times slower than fp32
    precisions = ["fp32"] if emulated else ["fp32", "bf16"]
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
    """Watcher on every process that traces the steps after the first, and writes what they took to a file."""

    prompt = True  # a trace begins and ends between two steps

    def started(self, info: Any) -> None:
        self._info, self._steps = info, 0
        self._trace = OperatorTrace(self.chronometer, on_gpu=info.device == "cuda")

    def stepped(self, record: Record) -> None:
        self._steps += 1
        if self._steps == WARMUP:
            self._trace.__enter__()
        elif self._steps > WARMUP:
            self._trace.end_step()
        if self._steps == WARMUP + TRACED_STEPS:
            self._trace.__exit__(None, None, None)

    def ended(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            file = _trace_file(self._info.folder, self._info.rank)
            files.replace(file, msgspec.json.encode(self._trace.costs()), IN_RUN)


def tables(breakdowns: Sequence[TimeBreakdown]) -> Iterator[Table | str]:
    """Yields, for each plan, the table of its time's parts: the largest saving first, useful compute last."""
    for breakdown in breakdowns:
        title = f"{plan_name(breakdown.plan)} (batch {breakdown.batch})"
        if breakdown.failure:
            yield f"{title}: its steps could not be traced: {breakdown.failure}"
            continue
        yield ""
        rows = plain_table(f"{title}, {breakdown.seconds * 1e3:.4g} ms a step", "share", "what moves it", "gain")
        parts = dict(breakdown.parts)
        useful = parts.pop(USEFUL)
        for remedy in breakdown.remedies:
            share = f"{parts.pop(remedy.part):.1%}" if remedy.part in parts else ""
            rows.add_row(_shown(remedy.part), share, _shown(remedy.word), remedy.gain)
        rows.add_row(_shown("less than that, together"), f"{sum(parts.values()):.1%}", "", "")
        rows.add_row(_shown(f"{USEFUL}, at the rate of {breakdown.precision}"), f"{useful:.1%}", "", "")
        yield rows


def _shown(text: str) -> str:
    return translated_line(text, sys.stdout)
