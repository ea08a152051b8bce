"""A run's forecast memory and GPU step, with its measurements; traced only once, in a process under limits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.checkpoint.commit import json_hash, read_json, write_json
from grappe.errors import GrappeError, RunError, TaskError
from grappe.errors.foreign_text import entries, printable
from grappe.foresight.devices import device_reported
from grappe.launch import files
from grappe.launch.terminal import progress
from grappe.plan import Plan
from grappe.private_api.multiprocessing import forget_forkserver
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference, reference_of
from grappe.verbs.foresee.training_time import costs_of, median_step, seconds_from
from grappe.verbs.load import data_of

if TYPE_CHECKING:
    from grappe.foresight.gpu_time import Fabric

SECONDS = 60  # of computing, for one call, which a machine that is busy does not use up
WAITING_SECONDS = 600  # for one call, in which a task's code may wait for something
MEMORY_BYTES = 4_000_000_000


def traced(text: str, work: Callable[[], Any]) -> Any:
    """Calls `work` in a process under limits, while a line shows `text`; returns its result, of JSON's types.

    The process may not take long, and its output is not the command's.

    Raises:
        TaskError: the process took longer, or more memory; and what `work` raises.
    """
    from grappe.foresight.search import too_slow
    from grappe.launch.fork import LimitReached, Limits, run_in_fork

    def too_long(kind: int, _: object) -> None:
        raise too_slow(SECONDS if kind == signal.SIGPROF else WAITING_SECONDS)

    def limited() -> str:
        forget_forkserver()
        os.dup2(2, 1)  # what the task prints is no part of a script
        sys.stdout = sys.stderr
        signal.signal(signal.SIGPROF, too_long)
        signal.signal(signal.SIGALRM, too_long)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(WAITING_SECONDS)
        return json.dumps(work())

    progress(text)
    try:
        return json.loads(run_in_fork(limited, Limits(memory=MEMORY_BYTES, mapped=1 << 40, seconds=10 * SECONDS)))
    except LimitReached as error:
        raise TaskError(
            f"tracing the model takes more than {MEMORY_BYTES / 1e9:g} GB of memory here, which grappe foresee may take"
        ) from error
    finally:
        progress("")


FILE = "foreseen.json"
"""In a run's folder, written when it is first asked for: tracing takes seconds, which no training shall wait for."""
DEPENDS_ON = (
    "task", "class", "fields", "plan", "source", "data", "dataset", "device", "threads", "processor", "versions",
)  # fmt: skip
STATES = ("parameters", "gradients", "optimizer")
NAMES = (*STATES, "peak", "evaluation", "checkpoint", "with_copies")
OF_A_CPU = "steps on CPUs are measured, not foreseen"
NO_DATA_SHEET = "grappe has no data sheet of their GPU"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeseenRun:
    """A run's memory and step, foreseen and measured, of the process with most: bytes and seconds."""

    run: str
    task: str
    plan: str
    device: str
    """"cpu" or "cuda"."""
    states: int | None = None
    """Foreseen: parameters, gradients and optimizer state."""
    states_measured: int | None = None
    peak: int | None = None
    """Foreseen, of steps, evaluations and checkpoints: on a GPU of tensors on it, on a CPU of the whole process:
    resident memory before the model was made, and what torch allocates then."""
    peak_measured: int | None = None
    foreseen: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The parts of what was foreseen: NAMES."""
    why: str = ""
    """The reason why something is missing."""
    step: float | None = None
    """Foreseen: seconds of a step on a GPU, from its data sheet."""
    step_measured: float | None = None
    """The median over steps."""
    step_why: str = ""
    """The reason why no step is foreseen, in words for several runs."""

    def as_json(self) -> dict[str, Any]:
        """Returns all of it in JSON's form; and how far what is foreseen is off, relative to the measured.

        Below 0 it is foreseen too low.
        """
        content = dataclasses.asdict(self)
        for name in ("states", "peak", "step"):
            foreseen, measured = content[name], content[f"{name}_measured"]
            content[f"{name}_error"] = None if foreseen is None or not measured else foreseen / measured - 1
        return content


def foreseen_run(run: Run, data: Path | None = None) -> ForeseenRun:
    """Compares a run's forecast with its measurements; its task is traced unless that was done before.

    No code is run because the run names it: its task is shipped, or was trained here and has not changed.

    Raises:
        RunError: run.json is damaged.
    """
    description = run.read_description()
    result = ForeseenRun(
        run=run.folder.resolve().name,
        task=printable(description.get("task"), 200),
        plan=printable(description.get("plan") or "", 200),
        device=printable(description.get("device") or "", 20),
    )
    costs = costs_of(description)
    if not costs:
        return dataclasses.replace(result, why="the training has measured nothing yet")
    held = [sum(_bytes(entries(cost.get("held")).get(name)) or 0 for name in STATES) for cost in costs]
    kind = "device" if result.device == "cuda" else "host"
    peaks = [(_bytes(entries(cost.get("peak")).get(kind)) or 0, _bytes(cost.get("baseline"))) for cost in costs]
    peak, baseline = max(peaks, key=lambda pair: pair[0])
    try:
        sizes, step, why = _foreseen(run, description, data)
    except GrappeError as error:
        return dataclasses.replace(result, why=str(error))
    before = 0 if kind == "device" else baseline
    most = sizes.get("with_copies")
    return dataclasses.replace(
        result,
        states=sum(sizes.get(name, 0) for name in STATES),
        states_measured=max(held) or None,
        peak=None if most is None or before is None else before + most,
        peak_measured=peak or None,
        foreseen=sizes,
        step=step,
        step_measured=median_step(description),
        step_why=why,
    )


def fabric_of(description: Mapping[str, Any]) -> tuple[Fabric | None, str]:
    """Finds the GPUs of a run by their data sheet; or None, and why there are none."""
    from grappe.foresight.gpu_time import Fabric

    costs = costs_of(description)
    if description.get("device") != "cuda":
        return None, OF_A_CPU
    device = device_reported(str(costs[0].get("device") or description.get("processor"))) if costs else None
    if device is None:
        return None, NO_DATA_SHEET
    nodes = [cost.get("host") for cost in costs]
    return Fabric(device=device, node=max(nodes.count(node) for node in nodes)), ""


def _foreseen(run: Run, description: Mapping[str, Any], data: Path | None) -> tuple[dict[str, int], float | None, str]:
    """Reads what was foreseen of this very training, or foresees it and writes it down where that is possible.

    Returns bytes by NAMES; the seconds of a step, and why they are missing.
    """
    of = json_hash({name: description.get(name) for name in DEPENDS_ON})
    file = run.folder / FILE
    fabric, why = fabric_of(description)
    sheet = "" if fabric is None else json_hash(dataclasses.asdict(fabric))
    content: Any = None
    if files.kind(file) == "file":
        with contextlib.suppress(RunError):
            written = read_json(file)
            if written.get("of") == of and (not sheet or entries(written.get("step")).get("from") == sheet):
                content = written
    if content is None:
        reference = reference_of(run, asks=False)  # before a line says that it is traced
        text = f"tracing the model of {run.folder.name}, to foresee its memory and step; once"
        content = traced(text, lambda: _traced(run, description, reference, data, fabric, sheet))
        with contextlib.suppress(OSError, RunError):
            write_json(file, {"of": of, **content})
    # A run is not trusted: only numbers of bytes and seconds are kept.
    read = {name: _bytes(entries(content.get("foreseen")).get(name)) for name in NAMES}
    step = entries(content.get("step"))
    seconds = seconds_from(step.get("seconds")) if sheet else None
    reason = "" if seconds is not None else why or printable(step.get("why") or "", 500)
    return {name: size for name, size in read.items() if size is not None}, seconds, reason


def _traced(
    run: Run,
    description: Mapping[str, Any],
    reference: TaskReference,
    data: Path | None,
    fabric: Fabric | None,
    sheet: str,
) -> dict[str, Any]:
    """Traces a run's model once; returns the content of FILE, without what it depends on."""
    from grappe.foresight.fake_model import FakeModel
    from grappe.foresight.forecast import memory_forecast
    from grappe.foresight.gpu_time import gpu_time
    from grappe.foresight.kernels import Kernels
    from grappe.launch.local import start_server

    plan, gpu = Plan.parse(str(description.get("plan") or "")), description.get("device") == "cuda"
    threads = description.get("threads")
    if plan.threads is None and isinstance(threads, int) and threads > 0:
        plan = dataclasses.replace(plan, threads=threads)  # as many as that machine's cores
    task = reference.resolve()
    if not gpu:
        start_server(metrics=False)  # kernels run in a process that has no OpenMP threads of its parents
    fake_model = FakeModel(
        task, data_of(run, data), foreach=gpu, kernels=None if gpu else Kernels(), records=fabric is not None
    )
    forecast = memory_forecast(fake_model, plan, gpu=gpu)
    values = {name: getattr(forecast.states, name) for name in STATES}
    values |= {name: getattr(forecast, name) for name in NAMES if name not in STATES}
    step: dict[str, Any] = {}
    if fabric is not None:
        try:
            step = {"from": sheet, "seconds": gpu_time(fake_model, plan, fabric).total}
        except GrappeError as error:  # the memory is useful without the time
            step = {"from": sheet, "why": str(error)}
    return {"foreseen": values, "step": step}


def _bytes(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60 else None
