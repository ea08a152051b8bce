"""Traced training: a short training whose operators are traced, with an evaluation and a save after the trace."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe.launch import files
from grappe.launch.files import IN_RUN
from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.plan import Plan
from grappe.profiling.module_times import ModuleTimes
from grappe.profiling.operator_sums import Floor, LineCost, Traced
from grappe.profiling.operators import OperatorTrace, least
from grappe.profiling.phases import BACKWARD, CHECKPOINT, EVALUATION, FORWARD, PHASES, WARMUP
from grappe.sites.generations import unfit_precision
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.watchers.base import ClockWatcher, Outcome, Record
from grappe.training.worker import worker as train_worker

TRACED = 5  # steps whose operators are timed
TRIED = 2  # steps in which matrix products are tried in another precision
UNTRACED = 6  # steps of the same process before the trace
HALF = WARMUP + UNTRACED + 1
"""Steps to the first evaluation and save, which warm up; as many follow, with the trace, to the second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """The input of a traced training's processes."""

    training: Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """The findings of one process of a traced training."""

    traced: Traced | None
    computing: float
    """Seconds of forward and backward, by the host's clock, in steps of the same process that were not traced."""
    evaluation: float
    """Seconds of an evaluation."""
    checkpoint: float
    """Seconds that the training waits for a save."""
    gradients: int
    """Bytes of the gradients on this process."""
    largest: tuple[str, int]
    """Name and bytes of the largest of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traces:
    """The findings of a traced training."""

    processes: tuple[Seen, ...]
    reachable: Mapping[str, float]
    """Measured FLOP/s of a large matrix product, by precision that the device has units for."""
    steps_per_epoch: int


def traced(request: Request, plan: Plan, folder: Path) -> Traces:
    """Runs a traced training under `plan`, in new processes.

    Raises:
        GrappeError: the training fails.
    """
    options = Options(steps=2 * HALF, evaluate_every=HALF, save_every=HALF)
    watcher = TraceWatcher(precision=plan.precision, compiled=plan.compile)
    training = dataclasses.replace(
        request, plan=plan, run=folder, base=folder.parent, options=options, also=(watcher,), quiet=True
    )
    return start("grappe.verbs.measure.traced:worker", TraceRequest(training=training), plan, run=folder)


def worker(request: TraceRequest, process: ProcessRank, rendezvous_folder: Path) -> Traces | None:
    """Runs one process of a traced training. Collective."""
    result = train_worker(request.training, process, rendezvous_folder)
    if process.rank:
        return None
    from grappe.launch.world import choose_device

    plan = request.training.plan
    described = json.loads(files.read_text(_file(result.run, 0)))
    return Traces(
        processes=tuple(_read(_file(result.run, rank)) for rank in range(plan.processes)),
        reachable=reachable(choose_device(plan, process), plan),
        steps_per_epoch=described["steps_per_epoch"],
    )


def reachable(device: Any, plan: Plan) -> dict[str, float]:
    """Measures FLOP/s of a large matrix product in each precision that the device has units for."""
    import torch

    from grappe.verbs.measure import flops

    precisions = ["fp32", "bf16"]
    if device.type == "cuda":
        gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        known = None if torch.version.hip else capability
        tried = ("fp32", "bf16", "fp16") if torch.version.hip else ("fp32", "tf32", "bf16", "fp16")
        precisions = [one for one in tried if unfit_precision(one, gpu, known) is None]
    wanted: dict[Any, None] = dict.fromkeys([*precisions, plan.precision])
    return {one: flops.reachable(device, dataclasses.replace(plan, precision=one)) for one in wanted}


def _file(run: Path, rank: int) -> Path:
    return run / f"operators-{rank}.json"


def _read(file: Path) -> Seen:
    known: dict[str, Any] = json.loads(files.read_text(file))
    del known["steps_per_epoch"]
    found: dict[str, Any] | None = known["traced"]
    if found is not None:
        for name in ("host_lines", "read_lines", "copy_lines"):
            found[name] = tuple(LineCost(**line) for line in found[name])
        known["traced"] = Traced(**found)
    known["largest"] = tuple(known["largest"])
    return Seen(**known)


class TraceWatcher(ClockWatcher):
    """Watcher on every process that traces steps after the first evaluation, and writes what it saw.

    Args:
        precision: the plan's.
        compiled: whether units are compiled, which hooks on modules would do anew.
    """

    prompt = True  # a trace begins and ends between two steps

    def __init__(self, precision: str, *, compiled: bool = False) -> None:
        self._precision, self._compiled = precision, compiled
        self._seen = 0
        self._untraced: list[tuple[int, list[float]]] = []
        self._modules: ModuleTimes | None = None
        self._before = [0.0] * len(PHASES)
        self._floor = Floor(gap=0.0, seconds=0.0, plain=0.0)
        self._trace: OperatorTrace | None = None
        self._kernels: Any = None
        self._folder = Path()
        self._rank = self._steps_per_epoch = 0
        self._device = "cpu"

    def started(self, info: Any) -> None:
        self._folder, self._rank, self._device = info.folder, info.rank, info.device
        self._steps_per_epoch = info.steps_per_epoch

    def stepped(self, record: Record) -> None:
        self._seen += 1
        if WARMUP <= self._seen <= HALF:
            self._untraced.append(self.chronometer.spent())
            self._time_modules()
        since = self._seen - HALF - 1
        if since == 0:
            self._before = self.chronometer.spent()[1]
            self._begin()
        elif self._trace is not None and since > 0:
            self._trace.end_step(then_try=since >= TRACED)
            if since == TRACED + TRIED:
                self._end()

    def _time_modules(self) -> None:
        """Times modules in the steps that are not traced, where operators are timed by the host's clock."""
        if self._modules is not None:
            self._modules.end_step()
        elif self._device == "cpu" and not self._compiled:
            self._modules = ModuleTimes(self.chronometer)
            self._modules.start()

    def _begin(self) -> None:
        import torch

        self._floor = least(self.chronometer)
        if self._device == "cuda":
            from grappe.profiling.kernel_times import KernelTimes

            self._kernels = KernelTimes()
            self._trace = OperatorTrace(self.chronometer, device_seconds=self._kernels.seconds)
            self._kernels.start()
        else:
            other = torch.bfloat16 if self._precision == "fp32" else torch.float32
            self._trace = OperatorTrace(self.chronometer, other, modules=self._modules)
        self._trace.__enter__()

    def _end(self) -> None:
        assert self._trace is not None
        self._trace.__exit__(None, None, None)
        if self._kernels is not None:
            self._kernels.stop()
        if self._modules is not None:
            self._modules.stop()
        # On a busy machine one of the two may be too long, and would leave nothing of quick operators.
        self._floor = min(self._floor, least(self.chronometer), key=lambda one: one.traces)

    def ended(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        spent, forward = dict(zip(PHASES, self._before, strict=True)), _middle(self._untraced, FORWARD)
        totals = outcome.timing.totals
        sizes = [(name, one.numel() * one.element_size()) for name, one in self.chronometer.parameters]
        seen = Seen(
            traced=None if self._trace is None else self._trace.result(self._floor, forward),
            computing=forward + _middle(self._untraced, BACKWARD),
            evaluation=totals[PHASES[EVALUATION]] - spent[PHASES[EVALUATION]],
            checkpoint=totals[PHASES[CHECKPOINT]] - spent[PHASES[CHECKPOINT]],
            gradients=sum(size for _, size in sizes),
            largest=max(sizes, key=lambda one: one[1], default=("", 0)),
        )
        content = {**dataclasses.asdict(seen), "steps_per_epoch": self._steps_per_epoch}
        files.replace(_file(self._folder, self._rank), json.dumps(content).encode(), IN_RUN)


def _middle(marks: Sequence[tuple[int, Sequence[float]]], phase: int) -> float:
    """Returns a phase's median seconds of a step, from the steps and the seconds so far at several moments."""
    each = [
        (then[phase] - now[phase]) / (b - a) for (a, now), (b, then) in itertools.pairwise(marks) if b > a
    ]
    return statistics.median(each) if each else 0.0
