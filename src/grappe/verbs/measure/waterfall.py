"""Waterfall: splits a step's time into parts that add up to all of it; the last is useful computing."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from grappe.parallel.pipeline.rules import idle_part
from grappe.plan import Plan
from grappe.profiling.operator_sums import Traced
from grappe.verbs.measure.points import Point, Process, Trial
from grappe.verbs.measure.traced import Seen, Traces

PARTS = (
    "evaluation",
    "checkpoints",
    "watching",
    "waiting for data",
    "transfers",
    "imbalance",
    "pipeline bubble",
    "copies for messages",
    "exposed communication",
    "update",
    "values read by the host",
    "host between kernels",
    "copies of layouts",
    "memory-bound operators",
    "small matrices",
    "precision not used",
    "not explained",
    "useful compute",
)
"""In the order in which they are taken off; what is left at the end is useful."""
USEFUL = PARTS[-1]
OWN = PARTS[PARTS.index("values read by the host") :]
"""Parts of forward and backward."""
PRODUCTS = ("small matrices", USEFUL)
"""Parts of matrix products, in the precision in which they are quickest."""
UNUSED = "precision not used"
LEAST_PRECISION = 0.05  # of matrix products' time, below which another precision is no gain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Every:
    """Steps between evaluations, and between saves."""

    evaluation: int
    save: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waterfall:
    """The parts of a step's time under one plan; evaluations and saves are spread over the steps between them."""

    plan: str
    batch: int
    seconds: float
    """Of a step, with its share of evaluations and saves."""
    parts: Mapping[str, float]
    """Seconds by part, all of PARTS; their sum is `seconds`."""
    precision: str
    """The precision in which matrix products are quickest on this device."""
    every: Every
    traces: Traces

    def share(self, part: str) -> float:
        """Returns the part's share of the time, 0 to 1."""
        return self.parts[part] / self.seconds


def waterfall(point: Point, traces: Traces, every: Every) -> Waterfall:
    """Splits the time of a measured point.

    Shares come from the point's steps, which nothing traced; the trace says only how forward and backward divide,
    beside untraced steps of the same process.
    """
    trial, plan = point.middle(), Plan.parse(point.plan)
    counted = _counted(trial, plan)
    phases = {
        name: statistics.fmean(one.phases[name] for one in counted) for name in trial.processes[0].phases
    }
    parts = dict.fromkeys(PARTS, 0.0)
    parts["evaluation"] = max(one.evaluation for one in traces.processes) / every.evaluation
    parts["checkpoints"] = max(one.checkpoint for one in traces.processes) / every.save
    parts["watching"], parts["update"] = phases["watching"], phases["update"]
    parts["waiting for data"], parts["transfers"] = phases["data"], phases["transfer"]
    parts |= _waits(trial, counted, phases["communication"], plan)
    own, precision = _computing(phases["forward"] + phases["backward"], counted, parts, traces, plan)
    parts |= own
    return Waterfall(
        plan=point.plan,
        batch=point.batch,
        seconds=sum(parts.values()),
        parts=parts,
        precision=precision,
        every=every,
        traces=traces,
    )


def with_precision(fall: Waterfall, seconds: float) -> Waterfall:
    """Returns the waterfall in which another precision saves `seconds` of a step, as a trial has shown.

    What it saves beside matrix products is taken from all kernels in proportion; what it does not save of them,
    since casts take as long, say, is given back to them.
    """
    known = fall.parts[UNUSED]
    parts = PRODUCTS if seconds < known else (*PRODUCTS, "copies of layouts", "memory-bound operators")
    others = sum(fall.parts[part] for part in parts)
    saved = min(max(seconds, 0.0), known + others)
    left = known + others - saved
    changed = {part: left * fall.parts[part] / others for part in parts} if others else {USEFUL: left}
    return dataclasses.replace(fall, parts={**fall.parts, **changed, UNUSED: saved})


def _counted(trial: Trial, plan: Plan) -> Sequence[Process]:
    """Returns the processes whose time is split: a pipeline's all; else all but the slowest, for which they wait."""
    if len(trial.processes) == 1 or plan.pipeline > 1:
        return trial.processes
    slow = max(trial.processes, key=lambda one: one.busy)
    return [one for one in trial.processes if one is not slow]


def _waits(trial: Trial, counted: Sequence[Process], waited: float, plan: Plan) -> dict[str, float]:
    """Splits the time in which processes wait for others.

    A pipeline of p processes with work c each in m microbatches takes c + (p-1) c / m. With unequal work, of mean
    c, the largest sets the pace, and the others fill it once: max + (p c - max) / m. What equal work would save, which
    is (max - c) (1 - 1 / m), is imbalance; what would then remain, (p-1) c / m, is the bubble.
    """
    if plan.pipeline > 1:
        work = [one.phases["forward"] + one.phases["backward"] for one in trial.processes]
        mean, bubble = statistics.fmean(work), idle_part(plan)
        imbalance = min(waited, (max(work) - mean) * (1 - bubble / (plan.pipeline - 1)))
        idle = min(waited - imbalance, mean * bubble)
    else:
        longest = max(one.busy for one in trial.processes)
        mean = statistics.fmean(one.busy for one in counted)
        imbalance, idle = min(waited, longest - mean), 0.0
    return {
        "imbalance": imbalance,
        "pipeline bubble": idle,
        "exposed communication": waited - imbalance - idle,
    }


def _computing(
    seconds: float, counted: Sequence[Process], parts: Mapping[str, float], traces: Traces, plan: Plan
) -> tuple[dict[str, float], str]:
    """Splits forward and backward of `seconds`, and what the trace saw of messages; returns as `computed` does."""
    seen = [traces.processes[one.rank] for one in counted]
    known = [one.traced for one in seen if one.traced is not None]
    pace = _pace(seconds, seen)
    called = min(seconds, pace * _mean(one.launches for one in known))
    waited = parts["exposed communication"]
    copied = min(waited, pace * _mean(one.messages for one in known))
    own, precision = computed(seconds - called, seen, traces.reachable, plan.precision, pace=pace)
    if plan.compile:  # kernels that were fused are no operators
        own["not explained"] += own["host between kernels"]
        own["host between kernels"] = 0.0
    return {
        **own,
        "copies for messages": copied,
        "exposed communication": waited - copied + called,
    }, precision


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else 0.0


def computed(
    seconds: float, seen: Sequence[Seen], reachable: Mapping[str, float], precision: str, *, pace: float
) -> tuple[dict[str, float], str]:
    """Splits forward and backward of `seconds`; returns the parts, and the quickest precision.

    Args:
        seen: of the processes that are counted.
        reachable: FLOP/s of a large matrix product, by precision.
        pace: seconds of this process for a second of those.
    """
    traces = [one.traced for one in seen if one.traced is not None]
    if not traces:
        return {**dict.fromkeys(OWN, 0.0), "not explained": seconds}, precision
    on_device = traces[0].clock == "device"
    mean = {name: pace * statistics.fmean(getattr(one, name) for one in traces) for name in _SECONDS}
    flops = statistics.fmean(one.flops for one in traces)
    kernels = sum(mean[name] for name in _KERNELS)
    # What was timed without a trace counts. Kernels take longer under one, which uses the caches, too; reads do not.
    reading = min(mean["reads"], max(0.0, seconds - kernels) if on_device else seconds)
    left = seconds - reading
    scale = min(1.0, left / kernels) if kernels else 1.0
    between = max(0.0, left - kernels)
    host = between if on_device else min(between, max(0.0, mean["host"] - reading))
    matrix = mean["matrix"] * scale
    best, saved = _other_precision(matrix, flops, traces, reachable, precision)
    useful = min(matrix - saved, flops / reachable[best])
    return {
        "values read by the host": reading,
        "host between kernels": host,
        "copies of layouts": mean["copies"] * scale,
        "memory-bound operators": (mean["casts"] + mean["elementwise"]) * scale,
        "small matrices": matrix - saved - useful,
        UNUSED: saved,
        "not explained": between - host,
        USEFUL: useful,
    }, best


_KERNELS = ("matrix", "copies", "casts", "elementwise")
_SECONDS = (*_KERNELS, "host", "reads")


def _pace(seconds: float, seen: Sequence[Seen]) -> float:
    """Compares the seconds of forward and backward with those of the traced processes.

    Another process has another pace: by where its memory lies, say, or by what else its machine does. A GPU has none.
    """
    untraced = statistics.fmean(one.computing for one in seen)
    on_device = any(one.traced is not None and one.traced.clock == "device" for one in seen)
    return 1.0 if on_device or not untraced else seconds / untraced


def _other_precision(
    matrix: float, flops: float, traces: Sequence[Traced], reachable: Mapping[str, float], precision: str
) -> tuple[str, float]:
    """Returns the quickest precision for matrix products of `matrix` seconds, and what it saves of them.

    Where they were tried in another precision, that counts. On a GPU the gain is that of their operations alone, at
    the rates of a large product.
    """
    if traces[0].clock == "device":
        best = max(reachable, key=lambda one: reachable[one])
        saved = flops / reachable[precision] - flops / reachable[best]
    else:
        tried = [one.other_part for one in traces if one.other_part is not None]
        best = "bf16" if precision == "fp32" else "fp32"
        saved = matrix * (1 - statistics.fmean(tried)) if tried else 0.0
    return (best, min(saved, matrix)) if saved > LEAST_PRECISION * matrix else (precision, 0.0)
