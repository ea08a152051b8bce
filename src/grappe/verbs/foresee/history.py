"""History: what was foreseen of each run's memory and step beside what it measured, and the errors over all runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.checkpoint.commit import json_hash, read_json, write_json
from grappe.errors import GrappeError, RunError
from grappe.errors.foreign_text import printable
from grappe.launch import files
from grappe.launch.terminal import progress
from grappe.plan import Plan
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference, reference_of
from grappe.verbs.foresee.limited import in_limited_process
from grappe.verbs.foresee.run_time import (
    TimeSource,
    costs_of,
    seconds,
    step_foreseen,
    step_measured,
    time_source,
)
from grappe.verbs.load import data_of

if TYPE_CHECKING:
    from grappe.foresight.sketch import Sketch

FILE = "foreseen.json"
"""In a run's folder, written by who asks first: tracing takes seconds, which no training shall wait for."""
DEPENDS_ON = (
    "task", "class", "fields", "plan", "source", "data", "dataset", "device", "threads", "processor", "versions",
)  # fmt: skip
STATES = ("parameters", "gradients", "optimizer")
NAMES = (*STATES, "peak", "evaluation", "checkpoint", "with_copies")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """A run's memory and step, foreseen and measured; of the process that has most, in bytes and seconds."""

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
    """Foreseen: seconds of a step."""
    step_measured: float | None = None
    """The median over steps."""
    step_why: str = ""
    """The reason why no step is foreseen, in words for several runs."""

    @property
    def states_error(self) -> float | None:
        """Computes how far the foreseen states are off, relative to the measured; below 0: foreseen too low."""
        return _error(self.states, self.states_measured)

    @property
    def peak_error(self) -> float | None:
        """Computes how far the foreseen peak is off, likewise."""
        return _error(self.peak, self.peak_measured)

    @property
    def step_error(self) -> float | None:
        """Computes how far the foreseen step is off, likewise."""
        return _error(self.step, self.step_measured)

    def as_json(self) -> dict[str, Any]:
        """Returns all of it in JSON's form."""
        errors = {
            "states_error": self.states_error,
            "peak_error": self.peak_error,
            "step_error": self.step_error,
        }
        return {**dataclasses.asdict(self), **errors}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foreseen:
    """Sizes and step that were foreseen of a run, as its folder keeps them."""

    sizes: Mapping[str, int]
    """Bytes, by NAMES."""
    step: float | None = None
    step_why: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of one kind of prediction over several runs, without their signs."""

    what: str
    runs: int
    median: float
    high: float
    """The 95th percentile, by nearest rank."""
    worst: float


def compared(run: Run, data: Path | None = None) -> Compared:
    """Compares what is foreseen of a run with what it measured; its task is traced unless that was done before.

    No code is run because the run names it: its task is shipped, or was trained here and has not changed.

    Raises:
        RunError: run.json is damaged.
    """
    known = run.read_description()
    made = Compared(
        run=run.folder.resolve().name,
        task=printable(known.get("task"), 200),
        plan=printable(known.get("plan") or "", 200),
        device=printable(known.get("device") or "", 20),
    )
    costs = costs_of(known)
    if not costs:
        return dataclasses.replace(made, why="the training has measured nothing yet")
    held = [sum(_bytes(_dict(one.get("held")).get(name)) or 0 for name in STATES) for one in costs]
    kind = "device" if made.device == "cuda" else "host"
    peaks = [(_bytes(_dict(one.get("peak")).get(kind)) or 0, _bytes(one.get("baseline"))) for one in costs]
    peak, baseline = max(peaks, key=lambda one: one[0])
    try:
        found = _foreseen(run, known, data)
    except GrappeError as error:
        return dataclasses.replace(made, why=str(error))
    before = 0 if kind == "device" else baseline
    most = found.sizes.get("with_copies")
    return dataclasses.replace(
        made,
        states=sum(found.sizes.get(name, 0) for name in STATES),
        states_measured=max(held) or None,
        peak=None if most is None or before is None else before + most,
        peak_measured=peak or None,
        foreseen=found.sizes,
        step=found.step,
        step_measured=step_measured(known),
        step_why=found.step_why,
    )


def history(folder: Path, data: Path | None = None) -> list[Compared]:
    """Compares all runs in `folder`, oldest first; a run that cannot be read says why.

    Raises:
        RunError: there is none.
    """
    found = []
    for entry in (folder / name for name in (files.names(folder.resolve()) if folder.is_dir() else ())):
        if Run.is_run(entry):
            try:
                found.append(compared(Run(entry), data))
            except RunError as error:
                found.append(Compared(run=entry.name, task="", plan="", device="", why=str(error)))
    if not found:
        raise RunError(f"no run in {folder}: grappe train digits makes one")
    return found


def errors(found: Sequence[Compared]) -> list[Errors]:
    """Sums up the errors: of states, and by device of peaks and of steps."""
    kinds = {
        "parameters, gradients and optimizer state": [one.states_error for one in found],
        "peak on a GPU": [one.peak_error for one in found if one.device == "cuda"],
        "peak of a whole process on CPUs": [one.peak_error for one in found if one.device != "cuda"],
        "step on a GPU, from its data sheet": [one.step_error for one in found if one.device == "cuda"],
        "step on CPUs, from the calibration": [one.step_error for one in found if one.device != "cuda"],
    }
    made = []
    for what, values in kinds.items():
        sizes = sorted(abs(one) for one in values if one is not None)
        if sizes:
            high = sizes[math.ceil(0.95 * len(sizes)) - 1]
            median = statistics.median(sizes)
            made.append(Errors(what=what, runs=len(sizes), median=median, high=high, worst=sizes[-1]))
    return made


def _foreseen(run: Run, known: Mapping[str, Any], data: Path | None) -> Foreseen:
    """Reads what was foreseen of this very training, or foresees it and writes it down where that is possible."""
    of = json_hash({name: known.get(name) for name in DEPENDS_ON})
    file = run.folder / FILE
    source, why = time_source(known)
    if files.kind(file) == "file":
        with contextlib.suppress(RunError):
            written = read_json(file)
            step = _dict(written.get("step"))
            # Without a step it was written by an earlier grappe, or before this machine was calibrated.
            if written.get("of") == of and (source is None or step.get("from") == source.key):
                return _read(written, why)
    reference = reference_of(run, asks=False)  # before a line says that it is traced
    progress(f"tracing the model of {run.folder.name}, to foresee its memory and step; once")
    try:
        found = json.loads(in_limited_process(lambda: _traced(run, known, reference, data, source)))
    finally:
        progress("")
    with contextlib.suppress(OSError, RunError):
        write_json(file, {"of": of, **found})
    return _read(found, why)


def _read(written: Mapping[str, Any], why: str) -> Foreseen:
    """Reads the content of FILE: a run is not trusted.

    Args:
        why: the reason why no step can be foreseen now; one that was foreseen before is kept.
    """
    step = _dict(written.get("step"))
    found = seconds(step.get("seconds"))
    said = "" if found is not None else why or printable(step.get("why") or "", 500)
    return Foreseen(sizes=_sizes(written.get("foreseen")), step=found, step_why=said)


def _traced(
    run: Run,
    known: Mapping[str, Any],
    reference: TaskReference,
    data: Path | None,
    source: TimeSource | None,
) -> str:
    """Traces a run's model once; returns the content of FILE, without what it depends on."""
    from grappe.foresight.compose import needs
    from grappe.foresight.kernels import Kernels
    from grappe.foresight.sketch import Sketch
    from grappe.launch.local import start_server

    plan, gpu = Plan.parse(str(known.get("plan") or "")), known.get("device") == "cuda"
    threads = known.get("threads")
    if plan.threads is None and isinstance(threads, int) and threads > 0:
        plan = dataclasses.replace(plan, threads=threads)  # as many as that machine's cores
    task = reference.resolve()
    if not gpu:
        start_server(metrics=False)  # kernels run in a process that has no OpenMP threads of its parents
    sketch = Sketch(
        task,
        data_of(run, data),
        foreach=gpu,
        kernels=None if gpu else Kernels(),
        records=source is not None,
    )
    found = needs(sketch, plan, gpu=gpu)
    values = {name: getattr(found.states, name) for name in STATES}
    values |= {name: getattr(found, name) for name in NAMES if name not in STATES}
    return json.dumps({"foreseen": values, "step": _step(sketch, plan, source)})


def _step(sketch: Sketch, plan: Plan, source: TimeSource | None) -> dict[str, Any]:
    """Foresees the seconds of a step, or says why not: the memory is of use without them."""
    if source is None:
        return {}
    try:
        return {"from": source.key, "seconds": step_foreseen(sketch, plan, source).total}
    except GrappeError as error:
        return {"from": source.key, "why": str(error)}


def _sizes(values: object) -> dict[str, int]:
    """Keeps the numbers of bytes that have a known name: a run is not trusted."""
    read = {name: _bytes(_dict(values).get(name)) for name in NAMES}
    return {name: size for name, size in read.items() if size is not None}


def _bytes(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60 else None


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _error(foreseen: float | None, measured: float | None) -> float | None:
    return None if foreseen is None or not measured else foreseen / measured - 1
