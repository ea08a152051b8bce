"""grappe drill: injects faults into a small training of the user's task, and shows the loss and the recovery."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.checkpoint.format import list_checkpoints
from grappe.checkpoint.weights import MODEL
from grappe.errors import GrappeError, PlanError, UsageError
from grappe.launch import files
from grappe.launch.rank import rank_from_environment
from grappe.plan import Plan
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.training.watchers.base import Record, RunInfo, Watcher
from grappe.verbs.train import run_training
from grappe.words import first_line, plain_table

if TYPE_CHECKING:
    from rich.table import Table

STEPS, SAVE_EVERY, HURT_AT = 10, 2, 5
LEAST_STEPS = HURT_AT + 2
STALL_SECONDS = 10.0
NEAR = 1e-5  # contract 7, for another number of processes
DISTURBED = "drill-disturbed.json"
RESUMED = "drill-resumed.json"
POLL_SECONDS = 0.0002
SPREAD = 2.0  # steps within which a process is killed


@dataclasses.dataclass
class FaultInjector(Watcher):
    """Watcher that injects a fault into its own process once `step` is done; every process gets a pickled copy.

    Of a training that goes on after a fault it notes where it began, and the time of its first step's end.
    """

    fault: str = ""
    """Kind of fault; "" if there is none: the training resumes after one."""
    step: int = 0
    ranks: str = "all"
    """Ranks to fail: "all", "first" or "last"."""
    done: bool = False
    prompt = True

    def started(self, info: RunInfo) -> None:
        self._begun = info.start
        self._goes_on = not self.fault or info.start > 0  # where the command has started it again
        last = info.world_size - 1
        self._is_hurt = {"all": True, "first": info.rank == 0, "last": info.rank == last}[self.ranks]
        self._folder, self._rank = info.folder, info.rank

    def stepped(self, record: Record) -> None:
        if self.done or (record.step < self.step and not self._goes_on):
            return
        self.done = True
        if self._rank == 0:
            step, name = (self._begun, RESUMED) if self._goes_on else (record.step, DISTURBED)
            files.replace(self._folder / name, json.dumps({"step": step, "time": time.time()}).encode())
        if self._goes_on or not self._is_hurt or self.fault == "save":
            return
        if self.fault == "disk":
            # No file of this process can grow any more: like a full disk, and possible without root.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif self.fault == "SIGKILL":
            # Anywhere in the time after the step: each process at its own instant.
            threading.Timer(random.uniform(0, SPREAD * record.seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif self.fault == "wrong":
            compute_wrongly()
        else:
            os.kill(os.getpid(), getattr(signal, self.fault))

    def saving(self, step: int) -> None:
        if self.fault == "save" and self._is_hurt and step >= self.step:
            threading.Thread(target=self._kill_in_save, args=(step,), daemon=True).start()

    def _kill_in_save(self, step: int) -> None:
        while not any((self._folder / "checkpoints").glob(f".step-{step:06d}.*/rank-*")):
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)


def compute_wrongly() -> None:
    """Alters the outputs of all modules of this process from now on, in training."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    def altered(module: Any, inputs: Any, output: Any) -> Any:
        return output * 1.001 if isinstance(output, torch.Tensor) and output.requires_grad else None

    register_module_forward_hook(altered)


def damage(run: Path, *, flips: bool) -> None:
    """Flips one bit in the middle of the newest checkpoint's largest file, or cuts that file in half."""
    newest = list_checkpoints(Run(run).checkpoints)[0].folder
    file = max(newest.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    if flips:
        content[len(content) // 2] ^= 1
    else:
        del content[len(content) // 2 :]
    file.write_bytes(content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to inject, and the plan to resume under."""

    name: str
    kind: str = ""
    ranks: str = "all"
    """Those of the FaultInjector, after HURT_AT steps."""
    damage: Callable[[Path], None] | None = None
    """Function that damages the run's folder, once the training has paused."""
    plan: Plan | None = None
    """The plan under which to resume; None: the same."""
    restarts: int = 0
    """Number of times that the training starts again by itself; 0: a second command resumes it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultResult:
    """The effect of a fault on a training, and the training's recovery."""

    fault: str
    recovered: bool
    lost: int | None = None
    """Number of repeated steps."""
    seconds: float | None = None
    """Seconds from the new start to its first step."""
    weights: str = ""


def drill(request: Request, note: Callable[[str], None] = lambda words: None) -> Iterator[FaultResult]:
    """Injects faults into trainings of a few steps, in a temporary folder; yields a finding for each fault.

    Args:
        note: callback, called with a short description of the next fault.

    Raises:
        GrappeError: the task does not train without a fault.
    """
    if rank_from_environment() is not None:
        raise UsageError("grappe drill starts and kills its own processes: run it without torchrun or srun")
    with tempfile.TemporaryDirectory(prefix="grappe-drill-") as base:
        quiet = dataclasses.replace(request, base=Path(base), quiet=True)
        note("a training without faults")
        reference = _train(quiet, Path(base) / "undisturbed")
        if Run(reference).read_description()["step"] < LEAST_STEPS:
            raise UsageError(f"a drill takes {STEPS} steps, and this training has fewer: give it more epochs")
        faults_to_try = all_faults(request.plan)
        for number, fault in enumerate(faults_to_try):
            note(f"{fault.name} ({number + 1} of {len(faults_to_try)})")
            yield _finding(fault, quiet, Path(base) / f"fault-{number}", reference)


def all_faults(plan: Plan) -> list[Fault]:
    """Lists the faults to try under a plan."""
    many = plan.processes > 1
    cases = [Fault(name="one process killed", kind="SIGKILL", ranks="last")] if many else []
    cases += [
        Fault(name="all processes killed", kind="SIGKILL"),
        Fault(name="killed in a save", kind="save", ranks="first"),
        Fault(name="SIGTERM", kind="SIGTERM", ranks="first"),
        Fault(name="newest checkpoint truncated", damage=functools.partial(damage, flips=False)),
        Fault(name="a bit of it flipped", damage=functools.partial(damage, flips=True)),
        Fault(name="disk full", kind="disk"),
    ]
    if many:
        cases.append(Fault(name="one process stopped", kind="SIGSTOP", ranks="last"))
        cases.append(Fault(name="one killed, in the same command", kind="SIGKILL", ranks="last", restarts=1))
    if plan.checked:
        cases.append(Fault(name="one process computes wrongly", kind="wrong", ranks="last"))
    for name, change in (("killed, resumed with fewer processes", -1), ("killed, resumed with more processes", 1)):
        if (other := _resized(plan, change)) is not None:
            cases.append(Fault(name=name, kind="SIGKILL", plan=other))
    return cases


def _resized(plan: Plan, change: int) -> Plan | None:
    key = "shard" if plan.shard > 1 and plan.replicate == 1 else "replicate"
    degree = getattr(plan, key)
    other = degree + change if not plan.exact else degree * 2 if change > 0 else degree // 2
    changes: dict[str, Any] = {key: other}
    if key == "shard":
        changes["zero"] = plan.zero if other > 1 else 3
    elif degree == 1 and plan.pipeline > 1 and change < 0:
        changes = {"pipeline": 1, "schedule": Plan.schedule, "stages": Plan.stages}
    elif other < 1:
        return None
    with contextlib.suppress(PlanError):  # exact= has pieces for so many processes only
        return dataclasses.replace(plan, **changes)
    return None


OPTIONS = Options(
    steps=STEPS,
    evaluate_every=STEPS,
    save_every=SAVE_EVERY,
    keep=STEPS,
    stop_on_failed_save=True,
    stall_limit=STALL_SECONDS,
)


def _train(request: Request, run: Path, *watchers: Watcher, options: Options = OPTIONS) -> Path:
    return run_training(dataclasses.replace(request, run=run, per_process_watchers=watchers, options=options)).run


def _finding(fault: Fault, request: Request, run: Path, reference: Path) -> FaultResult:
    done = _disturb(fault, request, run)
    if done is None:
        return FaultResult(fault=fault.name, recovered=False, weights="the fault had no effect")
    began = time.time()
    try:
        if fault.restarts:
            began = json.loads(files.read_text(run / DISTURBED))["time"]
        else:
            _train(dataclasses.replace(request, plan=fault.plan or request.plan), run, FaultInjector())
        resumed = json.loads(files.read_text(run / RESUMED))
    except (GrappeError, OSError) as error:
        return FaultResult(fault=fault.name, recovered=False, weights=first_line(error))
    gap = difference(reference, run, every_tensor=fault.plan is None)
    words = "the same bits" if gap == 0 else f"{gap:.1g} away"
    return FaultResult(
        fault=fault.name,
        recovered=gap == 0 or fault.plan is not None,
        lost=max(0, done - resumed["step"]),
        seconds=resumed["time"] - began,
        weights=f"within {NEAR:g} ({words})" if 0 < gap <= NEAR else words,
    )


def _disturb(fault: Fault, request: Request, run: Path) -> int | None:
    """Trains until the fault; returns the steps done by then, None when the fault had no effect."""
    if fault.damage is not None:
        done = HURT_AT - HURT_AT % SAVE_EVERY + SAVE_EVERY
        _train(request, run, options=dataclasses.replace(OPTIONS, steps=done))
        fault.damage(run)
        return done
    options = dataclasses.replace(OPTIONS, restarts=fault.restarts)
    with contextlib.suppress(GrappeError), contextlib.redirect_stderr(io.StringIO()):  # it is meant to fail
        _train(request, run, FaultInjector(fault.kind, HURT_AT, fault.ranks), options=options)
    description = Run(run).read_description()
    if description.get("status") == "paused" and description["restarts"] == 0:
        return None
    return json.loads(files.read_text(run / DISTURBED))["step"]


def difference(a: Path, b: Path, *, every_tensor: bool) -> float:
    """Computes the largest |a - b| / |a| over the tensors of two runs' newest checkpoints; 0: the same bits.

    Args:
        every_tensor: whether to include optimizer state and buffers in addition to the model's parameters.
    """
    import torch

    first, second = (Run(run).latest() for run in (a, b))
    if first is None or second is None or first.step != second.step:
        return float("inf")
    ours, theirs = first.read_tensors(), second.read_tensors()
    names = [name for name in ours if every_tensor or name.startswith(MODEL)]
    worst = 0.0
    for name in names:
        if name not in theirs:
            return float("inf")
        x, y = ours.read(name), theirs.read(name)
        if not torch.equal(x, y):
            gap = (x.double() - y.double()).norm() / x.double().norm().clamp(min=1e-30)
            worst = max(worst, float(gap) or 1e-30)
    return worst


def table(findings: list[FaultResult]) -> Table:
    """Formats findings as a table."""
    rows = plain_table("fault", "recovered", "steps lost", "seconds to next step", "weights")
    for result in findings:
        lost = "" if result.lost is None else str(result.lost)
        seconds = "" if result.seconds is None else f"{result.seconds:.1f}"
        rows.add_row(result.fault, "yes" if result.recovered else "NO", lost, seconds, result.weights)
    return rows
