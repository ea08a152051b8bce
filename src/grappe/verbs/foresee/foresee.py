"""Foresees plans: memory of a process, whether a site's GPUs have room for it, and the time of a step."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grappe.errors import GrappeError, PlanError, TaskError, UsageError
from grappe.foresight.devices import Device, device_named, device_reported
from grappe.launch.mps import CLIENTS
from grappe.launch.terminal import progress
from grappe.launch.world import cores
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.sites import find
from grappe.sites.layout import hourly_charge, on_site
from grappe.table import Table, Tabular
from grappe.task import Task
from grappe.training.request import data_folder
from grappe.training.task_reference import TaskReference
from grappe.words import count_of, format_bytes, plan_name

if TYPE_CHECKING:
    from grappe.foresight.fake_model import FakeModel
    from grappe.foresight.gpu_time import Fabric, StepTime
    from grappe.foresight.search import Foreseen, MemoryBudget
    from grappe.sites.schema import Site
    from grappe.verbs.foresee.measured_step import LocalGpus

Aim = Literal["fastest", "cheapest", "smallest"]
GPU_MEMORY = re.compile(r"((?:\d+ or )*\d+) ?GB")
CLOSE = 0.1  # of a time: the same plan differs by as much from start to start
WORTH = 0.3
"""Share of a GPU below which it is not worth its queue: half of what large kernels use (OF_PEAK, OF_BANDWIDTH)."""
MEASURED = 5  # plans at most whose steps are run here
SECONDS = 15.0  # for the steps of all of them
SECONDS_OF_A_PLAN = 5.0  # for a plan at least, however little of SECONDS is left


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Cost of a training under a plan, of its steps alone."""

    samples_per_second: float
    hours: float
    """Hours of all the task's epochs."""
    unit_hours: float
    """Hours of all cores, or of all GPUs."""
    on_gpus: bool = False
    kwh: float | None = None
    """Energy of the GPUs at their data sheet's highest power, in kWh; None if not known."""
    charge: float | None = None
    """The site's charge in its own unit; None if not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedPlan:
    """A foreseen plan with its time."""

    foreseen: Foreseen
    time: StepTime | None = None
    cost: TrainingCost | None = None
    why: str = ""
    """The reason why there is no time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanTimes(Tabular):
    """Times of several plans."""

    plans: tuple[TimedPlan, ...]
    gpu: str = ""
    """The GPU that they are of; "": this machine's cores."""
    unit: str = ""
    """The unit of the site's charge; "": unknown, or no site."""
    notes: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    """Sentences on how the figures are foreseen, for --all."""
    reasons: tuple[str, ...] = ()
    """Reasons why some plans have no time."""
    budget: MemoryBudget | None = None
    """The memory of the site's GPU; None: no site, or of plans for CPUs alone."""

    def __repr__(self) -> str:
        return f"PlanTimes({self.table()})"

    def table(self) -> Table:
        """Returns a row for each plan: bytes of the process that needs most, seconds of a step, hours of training."""
        return Table(
            {"plan": plan_name(timed.foreseen.plan), "batch": timed.foreseen.batch}
            | {"memory": self.taken(timed) if timed.foreseen.needs is not None else None, "fits": timed.foreseen.fits}
            | {"step": timed.time and timed.time.total, "spread": timed.time and timed.time.spread}
            | {
                name: getattr(timed.cost, name, None)
                for name in ("samples_per_second", "hours", "unit_hours", "kwh", "charge")
            }
            | {"why": timed.foreseen.why or timed.why}
            for timed in self.plans
        )

    def taken(self, timed: TimedPlan) -> int:
        """Returns the bytes that a process of a foreseen plan takes; where its peak is unknown, at least."""
        needs = timed.foreseen.needs
        assert needs is not None
        if self.budget is not None and timed.foreseen.fits is not None:
            return self.budget.of_each(Plan.parse(timed.foreseen.plan).per_device).taken(needs)
        return needs.states.total if needs.most is None else needs.most


def budget_in(site: Site) -> MemoryBudget | None:
    """Reads the memory of a site's GPU; None: the site does not name it."""
    from grappe.foresight.search import MemoryBudget

    node = site.node
    if node is not None and node.slice is not None:
        return MemoryBudget(whose=f"{site.name}'s slice {node.slice.name}", size=node.slice.gpu_gb * 10**9)
    match = GPU_MEMORY.search(node.gpu) if node is not None and node.gpus else None
    if node is None or match is None:
        return None
    smallest = min(map(int, match[1].split(" or ")))  # a job may get either
    return MemoryBudget(whose=f"{site.name}'s {node.gpu}", size=smallest * 10**9)


def foresee(
    task: Task | type[Task] | str,
    plans: Sequence[AnyPlan] = (),
    *,
    gpus: Sequence[int] = (),
    batch_size: Sequence[int] = (),
    site: str | None = None,
    fields: Mapping[str, object] | None = None,
    data: Path | str | None = None,
    times: bool = True,
) -> PlanTimes:
    """Foresees each plan's memory and time at each batch size; without plans, some that train the same on `gpus`.

    For the memory nothing is trained: the model is traced on tensors without memory. On a CPU the kernels that need
    memory of their own are run once each, in a process of their own. Times are of a site's GPU, from the data sheet;
    or without a site of this machine, its GPUs or for device=cpu its cores: a few steps of at most MEASURED plans.

    Args:
        times: whether times are foreseen or measured too.

    Raises:
        TaskError: the task cannot be traced.
        UsageError: no plan can be foreseen, or the site is not known.
    """
    from grappe.data.datasets import prepare
    from grappe.foresight.fake_model import FakeModel
    from grappe.foresight.kernels import Kernels
    from grappe.foresight.search import MemoryBudget, candidates, foreseen, in_words, on_each_number
    from grappe.verbs.foresee.measured_step import LocalGpus

    place = None if site is None else find(site, retired=False)
    requested = [as_plan(plan) for plan in plans] or list(candidates(gpus or (1, 2, 4, 8)))
    requested = [plan if place is None else on_site(plan, place) for plan in requested]
    gpus_here = LocalGpus.find() if place is None else None

    def on_gpu(plan: Plan) -> bool:
        return (place is not None or gpus_here is not None) and plan.device != "cpu"

    kinds = {on_gpu(plan) for plan in requested}
    budget = None if place is None or True not in kinds else budget_in(place)
    if budget is None and place is not None and True in kinds:
        raise UsageError(
            f"--site={site}: the memory of its GPU is unknown; leave --site out, and compare with your device's memory"
        )
    if gpus_here is not None and True in kinds:
        budget = MemoryBudget(whose=f"this machine's {gpus_here.name}", size=gpus_here.memory)
    reference = TaskReference.of(task, fields)
    resolved = reference.resolve()
    folder = data_folder(data)
    prepare(resolved, folder)
    chooses = any(plan.memory != "none" for plan in requested)
    records = chooses or (times and (True in kinds or any(map(is_one_process, requested))))
    models = {
        gpu: FakeModel(resolved, folder, foreach=gpu, kernels=None if gpu else Kernels(), records=records)
        for gpu in kinds
    }
    fabric = None if place is None else site_fabric(place)
    device = device_reported("" if gpus_here is None else gpus_here.name) if fabric is None else fabric.device
    forecasts = [
        foreseen(models[True], plan, batch, budget and budget.of_each(plan.per_device), device)
        if on_gpu(plan)
        else foreseen(models[False], plan, batch, None)
        for batch in batch_size or (resolved.batch_size,)
        for plan in requested
    ]
    if all(forecast.needs is None for forecast in forecasts):
        raise UsageError("; ".join(dict.fromkeys(forecast.why for forecast in forecasts)))
    notes = list(dict.fromkeys(forecast.chosen for forecast in forecasts if forecast.chosen))
    notes += without_data(models[max(kinds)], folder)
    if not times:
        untimed = tuple(TimedPlan(foreseen=forecast) for forecast in forecasts)
        return PlanTimes(plans=untimed, notes=tuple(notes), budget=budget)
    parts = []
    on_gpus = [forecast for forecast in forecasts if on_gpu(Plan.parse(forecast.plan))]
    if place is not None and on_gpus:
        parts.append(_on_gpus(models[True], on_gpus, place, fabric))
    elif on_gpus:
        parts.append(_here(models[True], on_gpus, reference, folder, gpus=gpus_here))
    if on_cores := [forecast for forecast in forecasts if forecast not in on_gpus]:
        parts.append(_here(models[False], on_cores, reference, folder, site=place))
    timed = {id(plan.foreseen): plan for part in parts for plan in part.plans}
    plans_timed = tuple(timed[id(forecast)] for forecast in forecasts)
    notes += [note for part in parts for note in part.notes]
    if budget is not None and not plans:
        for batch in batch_size or (resolved.batch_size,):
            choices = in_words(on_each_number(models[True], Plan(), gpus or (1, 2, 4, 8), batch, budget, device))
            notes += [f"batch_size={batch} {choices}" if len(batch_size) > 1 else choices] if choices else []
    if records and device is not None and (place is not None or on_gpus):
        most = cores() // gpus_here.number if gpus_here else place.node.cores_of(1) if place and place.node else 1
        notes += gpu_or_not(models[max(kinds)], plans_timed, device, budget, most)
    return PlanTimes(
        plans=plans_timed,
        gpu=parts[0].gpu,
        unit=place.charge.unit if place is not None and place.charge is not None else "",
        notes=tuple(notes),
        caveats=tuple(note for part in parts for note in part.caveats),
        reasons=tuple(reason for part in parts for reason in part.reasons),
        budget=budget,
    )


def without_data(fake_model: FakeModel, folder: Path) -> list[str]:
    """Says what the figures are foreseen for where the data are not there."""
    from grappe.foresight.trace import tensors_of

    if not fake_model.absent:
        return []
    shapes = " and ".join(str(list(leaf.shape[1:])) for leaf in tensors_of([fake_model.batches.example]))
    samples = f"{fake_model.samples:,} training samples of {shapes}"
    return [f"the data are not in {folder}: foreseen for {samples}, as the task's fake_data() gives them"]


def is_one_process(plan: Plan) -> bool:
    """Returns whether it is the default plan, which also may say that it is for the CPU."""
    return plan in (Plan(), Plan(device="cpu"))


def with_one_process(plans: Iterable[TimedPlan]) -> TimedPlan | None:
    """Returns the plan of one process among others; None: there is none."""
    return next((timed for timed in plans if is_one_process(Plan.parse(timed.foreseen.plan))), None)


def site_fabric(site: Site) -> Fabric | None:
    """Returns a site's GPUs, or its slice, with its parts of the GPU's rates; None: they have no data sheet here."""
    from grappe.foresight.gpu_time import Fabric

    node = site.node
    device = None if node is None else device_named(node.gpu)
    if node is None or device is None:
        return None
    if part := node.slice:
        tflops = {precision: part.fraction * rate for precision, rate in device.tflops.items()}
        bandwidth = device.bandwidth_gb * part.gpu_gb / int(device.memory_gb)
        device = dataclasses.replace(device, title=part.name, tflops=tflops, bandwidth_gb=bandwidth)
    return Fabric(device=device, node=node.gpus, network_gbit=node.network_gbit)


def _on_gpus(fake_model: FakeModel, forecasts: Sequence[Foreseen], site: Site, fabric: Fabric | None) -> PlanTimes:
    from grappe.foresight.gpu_time import gpu_time

    if fabric is None:
        why = (
            f"{site.name}: grappe has no data sheet of its GPU, so it predicts no times: run grappe measure in a "
            "job there"
        )
        return PlanTimes(plans=tuple(TimedPlan(foreseen=forecast) for forecast in forecasts), notes=(why,))
    device = fabric.device
    plans = []
    for forecast in forecasts:
        time_of, plan, why = None, Plan.parse(forecast.plan), ""
        if forecast.needs is not None:
            try:
                time_of = gpu_time(fake_model, plan, fabric, batch=forecast.batch)
            except TaskError:
                raise
            except GrappeError as error:
                why = str(error)
        charge = None if time_of is None else hourly_charge(plan, site)
        plans.append(_timed(forecast, time_of, fake_model, why, on_gpus=True, watts=device.watts, charge=charge))
    of = f"{device.title} ({device.source})"
    note = f"times are from the data sheet of {of}: not measured on it, take them as half to twice"
    return PlanTimes(plans=tuple(plans), gpu=device.title, caveats=(note,), reasons=tuple(_reasons(plans)))


def _here(
    fake_model: FakeModel,
    forecasts: Sequence[Foreseen],
    reference: TaskReference,
    data: Path,
    *,
    site: Site | None = None,
    gpus: LocalGpus | None = None,
) -> PlanTimes:
    """Runs some steps of the plans that matter here, one after the other, on the GPUs or the cores.

    Args:
        site: whose cores the plans are for: how fast they are is not known here.
        gpus: of this machine; None: its cores.
    """
    from grappe.verbs.foresee.measured_step import check_runs_here, measured_step

    sheet = None if gpus is None else device_reported(gpus.name)
    watts = None if sheet is None else sheet.watts
    start, tried = time.monotonic(), 0
    timed = {id(forecast): TimedPlan(foreseen=forecast) for forecast in forecasts}
    for forecast in by_importance([forecast for forecast in forecasts if forecast.needs is not None]):
        plan = Plan.parse(forecast.plan)
        assert forecast.needs is not None
        left = SECONDS - (time.monotonic() - start)
        time_of, why = None, ""
        try:
            if fake_model.absent:
                raise PlanError("its steps are not run: the data are not there")
            check_runs_here(plan, forecast.needs, gpus)
            if tried == MEASURED or left <= 0:
                continue
            tried += 1
            progress(f"running a few steps of {plan_name(forecast.plan)}")
            task = reference.with_batch(forecast.batch)
            device = "cpu" if gpus is None else "cuda"
            time_of = measured_step(task, plan, data, seconds=max(left, SECONDS_OF_A_PLAN), device=device)
        except GrappeError as error:
            why = str(error)
        finally:
            progress("")
        timed[id(forecast)] = _timed(forecast, time_of, fake_model, why, on_gpus=gpus is not None, watts=watts)
    plans = tuple(timed.values())
    notes, reasons = list[str](), _reasons(plans)
    left_out = sum(timed.foreseen.needs is not None and timed.time is None and not timed.why for timed in plans)
    if left_out:
        reasons.append(
            f"not run, though this machine could run them: {count_of(left_out, 'plan')}. foresee runs "
            f"steps of at most {MEASURED} plans, for about {SECONDS:.0f} s; name fewer with --plan, or try grappe "
            "measure"
        )
    if site is not None and any(plan.time is not None for plan in plans):
        notes.append(
            f"times of device=cpu are of steps that were run on this machine ({count_of(cores(), 'core')}): how fast "
            f"the cores of {site.cpu or site.name} are is not known here"
        )
    gpu = "" if gpus is None else f"this machine's {gpus.name}"
    return PlanTimes(plans=plans, gpu=gpu, notes=tuple(notes), reasons=tuple(reasons))


def by_importance(forecasts: Sequence[Foreseen]) -> list[Foreseen]:
    """Orders plans for a trial: plain ones before those that save activations; in turn of each number of processes."""
    places = Counter[tuple[int, int, int]]()
    order = {}
    for forecast in forecasts:
        plan = Plan.parse(forecast.plan)
        saving = bool(plan.recompute) + (plan.microbatches > 1)
        group = (saving, forecast.batch, forecast.processes)
        order[id(forecast)] = (saving, places[group])
        places[group] += 1
    return sorted(forecasts, key=lambda forecast: order[id(forecast)])


def gpu_or_not(
    fake_model: FakeModel, plans: Sequence[TimedPlan], device: Device, budget: MemoryBudget | None, most: int
) -> list[str]:
    """Says how much of a GPU a step of one process uses, and compares it with this machine's cores if they ran it.

    Args:
        fake_model: made with `records`.
        budget: the GPU's memory; None: nothing is said of processes that share it.
        most: processes that may share it, by the cores that there are for each GPU.
    """
    from grappe.foresight.gpu_time import Fabric, gpu_time

    run_here = [plan for plan in plans if plan.time is not None and plan.time.measured]
    measured, on_cores = (
        with_one_process(plan for plan in run_here if plan.cost is not None and plan.cost.on_gpus is on_gpus)
        for on_gpus in (True, False)
    )
    plain = measured or on_cores or plans[0]
    try:
        alone = Plan(precision=Plan.parse(plain.foreseen.plan).precision)
        sheet = gpu_time(fake_model, alone, Fabric(device=device), batch=plain.foreseen.batch)
    except GrappeError:
        return []
    on_gpu = sheet if measured is None or measured.time is None else measured.time
    share, at_peak = sheet.gpu_share(on_gpu.compute), sheet.at_peak or (0.0, 0.0)
    flops, moved = (min(1.0, seconds / on_gpu.compute) for seconds in at_peak)
    what = f"a step uses {flops:.0%} of the FLOP/s of one {device.title}, and {moved:.0%} of its memory bandwidth"
    advice, needs = "A larger batch_size uses more of it", plain.foreseen.needs
    if budget is not None and needs is not None and device.title.startswith("NVIDIA"):
        fitting = budget.size // budget.of_each(2).taken(needs)
        if (sharing := min(fitting, most, CLIENTS)) > 1:
            shared = f"--plan replicate={sharing},per_device={sharing}"
            advice = (
                f"{advice}, or processes that share it: {fitting} fit in its {format_bytes(budget.size)} ({shared})"
            )
    verdict = "enough to be worth its queue"
    if share < WORTH:
        verdict = f"too little to be worth its queue: train on cores (--plan device=cpu). {advice}"
    if on_cores is not None and on_cores.time is not None:
        faster = on_cores.time.total / on_gpu.total
        low, high = faster * (1 - on_gpu.spread), faster * (1 + on_gpu.spread)
        many = f"{cores()} cores here" if cores() > 1 else "one core here"
        between = f"it is {_times(low)} to {_times(high)} times as fast as the {many}"
        if high < 1:
            verdict = f"the {many} are {_times(1 / faster)} times as fast, and start sooner: take no GPU"
        elif low > 1:
            verdict = f"{between}: take a GPU" if share >= WORTH else f"{between}, and mostly idle. {advice}"
        else:
            verdict = f"{between}: try both (grappe measure)"
    return [f"GPU or CPU: {what}; {verdict}"]


def best(times: PlanTimes, aim: Aim) -> TimedPlan | None:
    """Chooses the best plan under an aim among those that fit, or may fit; None: no cost is known.

    Among plans whose times are within CLOSE of each other, the plainest wins.
    """

    def has_merit(timed: TimedPlan) -> bool:
        if aim != "smallest":
            return timed.time is not None
        return timed.foreseen.needs is not None and timed.foreseen.needs.most is not None

    candidates = [timed for timed in times.plans if has_merit(timed) and timed.foreseen.fits is not False]
    if aim == "smallest" or not candidates:
        return min(candidates, key=lambda timed: merit(timed, aim), default=None)
    least = min(merit(timed, aim) for timed in candidates)
    close = [timed for timed in candidates if merit(timed, aim) <= least * (1 + CLOSE)]

    def order(timed: TimedPlan) -> tuple[int, int, float]:
        plan = Plan.parse(timed.foreseen.plan)
        return plan.processes, plan.microbatches, merit(timed, aim)

    return min(close, key=order)


def merit(timed: TimedPlan, aim: Aim) -> float:
    """Returns a plan's cost under an aim, the least being best: hours, hours of all cores or GPUs, or bytes."""
    if aim == "smallest":
        assert timed.foreseen.needs is not None and timed.foreseen.needs.most is not None
        return float(timed.foreseen.needs.most)
    assert timed.cost is not None
    return timed.cost.unit_hours if aim == "cheapest" else timed.cost.hours


def reason(plan: str, why: str) -> str:
    """Says why a plan has no numbers; a beginning that the plan and the reason share is written once."""
    begun, colon, rest = why.partition(": ")
    if colon and f"{plan},".startswith((f"{begun},", f"{begun}=")):
        why = rest
    return f"{plan_name(plan)}: {why}"


def _reasons(plans: Sequence[TimedPlan]) -> list[str]:
    """Says why plans have no time: each reason once, with the first plan that it holds for."""
    first = {timed.why: timed.foreseen.plan for timed in reversed(plans) if timed.why}
    return [reason(plan, why) for why, plan in reversed(first.items())]


def _timed(
    forecast: Foreseen,
    time_of: StepTime | None,
    fake_model: FakeModel,
    why: str,
    *,
    on_gpus: bool,
    watts: float | None = None,
    charge: float | None = None,
) -> TimedPlan:
    from grappe.foresight.partition import threads_of

    if time_of is None:
        return TimedPlan(foreseen=forecast, why=why)
    plan, batch = Plan.parse(forecast.plan), min(forecast.batch, fake_model.samples)
    hours = fake_model.task.epochs * math.ceil(fake_model.samples / batch) * time_of.total / 3600
    units = hours * (-(-plan.processes // plan.per_device) if on_gpus else plan.processes * threads_of(plan))
    cost = TrainingCost(
        samples_per_second=batch / time_of.total,
        hours=hours,
        unit_hours=units,
        on_gpus=on_gpus,
        kwh=None if watts is None else units * watts / 1000,
        charge=None if charge is None else hours * charge,
    )
    return TimedPlan(foreseen=forecast, time=time_of, cost=cost)


def _times(factor: float) -> str:
    return f"{factor:.1f}" if factor < 9.95 else f"{factor:.0f}"
