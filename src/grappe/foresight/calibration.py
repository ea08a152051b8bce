"""Calibration: what this machine's operators, links and engine take, measured once and kept in the user's caches."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from grappe.checkpoint.commit import read_json, write_json
from grappe.errors import RunError, UsageError
from grappe.errors.foreign_text import printable
from grappe.foresight.links import COLLECTIVES, MEETING
from grappe.launch.world import cores
from grappe.words import processor_name

FORM = 9
"""Number of the file's form; one of another form is measured anew."""
LARGEST = 32 << 20  # bytes of the file
MOST = 50_000  # operators in it
DO = "measure it anew: grappe doctor --calibrate"
KINDS = (
    "one", "recompute", "offload", "replicate", "zero3", "zero1", "tensor", "pipeline", "interleaved", "zero_bubble",
)  # fmt: skip
"""Kinds of plans whose engine's own time is measured: one process, activation checkpointing, FSDP of one process, which
offloads, DDP, FSDP that frees parameters or not, modules that are split, pipelines of one stage a process, of several,
and of split backwards."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine that a calibration is of."""

    processor: str
    cores: int
    torch: str

    @classmethod
    def here(cls) -> Machine:
        """Describes this machine."""
        return cls(processor=processor_name(), cores=cores(), torch=torch.__version__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overhead:
    """Seconds that the engine takes beside its operators' kernels: Python, autograd, hooks, waits for others.

    Those of an operator may be below 0: to run a small operator by itself can take longer than in its place.
    """

    step: float = 0.0
    """For each step."""
    forward: float = 0.0
    """For each operator of a forward."""
    backward: float = 0.0
    """For each operator of a backward."""
    update: float = 0.0
    """For each operator of the optimizer's step."""
    unit: float = 0.0
    """For each unit, over one microbatch: of a sharded model gathers and reductions of next to nothing; under recompute
    what is kept and restored to run it again; of a pipeline for each pass of a stage; of split modules for each module
    over one microbatch."""
    busy: float = 0.0
    """So much more for each unit, or pass, where cores are busy, so that threads that carry messages wait for one."""
    busy_after: float = 0.0
    """Seconds of a unit's forward and backward, or of a pass, up to which it is nothing of that."""
    busy_from: float = 0.0
    """Such seconds from which on it is all of that; in between it is in proportion."""
    parameter: float = 0.0
    """For each parameter whose gradient is reduced; of a sharded model over one microbatch."""
    messages: float = 1.0
    """Factor by which messages take longer than by themselves: of tensors that caches have not, beside computing."""

    def unit_beside(self, computing: float) -> float:
        """Computes the seconds for a unit, or a pass, which computes for so many seconds."""
        over, span = computing - self.busy_after, self.busy_from - self.busy_after
        return self.unit + (min(1.0, max(0.0, over / span)) if span > 0 else 0.0) * self.busy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """All that was measured; times in seconds."""

    machine: Machine
    overheads: Mapping[str, Overhead]
    """By kind of plan: KINDS."""
    links: Mapping[str, Mapping[str, tuple[tuple[float, float], ...]]]
    """By number of processes and by collective: pairs of bytes and seconds, in rising order."""
    flops: Mapping[str, float]
    """FLOP/s of a large matrix product, by precision and threads: "fp32/2"."""
    bandwidth: Mapping[str, float]
    """Bytes/s of a copy that no cache holds, read and written, by threads."""
    operators: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """By setting ("2x1-holding": two threads, one process, where gradients stay until the update; "1x2-saving": under a
    plan that saves memory) and by call."""

    def with_operators(self, setting: str, found: Mapping[str, float]) -> Calibration:
        """Returns a calibration that knows these calls, too."""
        known = {**self.operators.get(setting, {}), **found}
        if len(known) > MOST:  # the newest are of use
            known = dict(list(known.items())[-MOST:])
        return dataclasses.replace(self, operators={**self.operators, setting: known})


def file_here() -> Path:
    """Returns the file of this machine's calibration: nodes of a cluster share a home folder."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    machine = Machine.here()
    name = hashlib.sha256(f"{machine.processor} {machine.cores}".encode()).hexdigest()[:12]
    return caches / "grappe" / f"calibration-{name}.json"


def read(file: Path | None = None) -> Calibration | None:
    """Reads this machine's calibration; None: there is none yet.

    Raises:
        UsageError: it is of another machine, processor or torch, or damaged: it is not used.
    """
    file = file or file_here()
    if not file.exists():
        return None
    try:
        content = read_json(file, largest=LARGEST)
    except RunError as error:
        raise UsageError(f"{error}: {DO}") from error
    here = Machine.here()
    try:
        if content.get("form") != FORM:
            raise UsageError(f"{file} was written by another version of grappe: {DO}")
        machine = _entries(content, "machine")
        made = Machine(
            **{name: _text(machine.get(name), f"machine.{name}") for name in ("processor", "torch")},
            cores=int(_number(machine.get("cores"), "machine.cores")),
        )
        for name in ("processor", "cores", "torch"):
            was, now = getattr(made, name), getattr(here, name)
            if was != now:
                raise UsageError(f"{file} is of another machine ({name}: {was!r} there, {now!r} here): {DO}")
        return _checked(content, made)
    except _Wrong as error:
        raise UsageError(f"{file} is damaged, in the entry {error}: {DO}") from error


def write(calibration: Calibration, file: Path | None = None) -> None:
    """Writes a calibration, for the next command.

    Raises:
        OSError: there is no room, or no right.
    """
    file = file or file_here()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"form": FORM, **dataclasses.asdict(calibration)})


class _Wrong(Exception):
    """An entry of a calibration is missing, or wrong; the message is the entry's place."""


def _checked(content: Mapping[str, Any], machine: Machine) -> Calibration:
    overheads = _entries(content, "overheads")
    return Calibration(
        machine=machine,
        overheads={
            kind: _overhead(overheads, kind, f"overheads.{kind}")
            for kind in KINDS
            if kind in overheads or kind == "one"  # few cores have no kinds of several processes
        },
        links={
            count: {
                name: _points(several.get(name), f"links.{count}.{name}") for name in (*COLLECTIVES, MEETING)
            }
            for count, several in _nested(content, "links").items()
        },
        flops=_numbers(_entries(content, "flops"), "flops", some=True),
        bandwidth=_numbers(_entries(content, "bandwidth"), "bandwidth", some=True),
        operators={
            setting: _numbers(several, f"operators.{setting}")
            for setting, several in _nested(content, "operators").items()
        },
    )


def _overhead(overheads: Mapping[str, Any], kind: str, where: str) -> Overhead:
    known = _entries(overheads, kind, where)
    names = [one.name for one in dataclasses.fields(Overhead)]
    return Overhead(**{name: _number(known.get(name), f"{where}.{name}", -1.0) for name in names})


def _points(points: Any, where: str) -> tuple[tuple[float, float], ...]:
    if not isinstance(points, list) or not points:
        raise _wrong(where)
    if any(not isinstance(one, list) or len(one) != 2 for one in points):
        raise _wrong(where)
    return tuple((_number(size, where), _number(took, where)) for size, took in points)


def _nested(content: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    known = _entries(content, name)
    return {_text(one, name): _entries(known, one, f"{name}.{one}") for one in known}


def _entries(content: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    found = content.get(name)
    if not isinstance(found, Mapping):
        raise _wrong(where or name)
    return found


def _numbers(values: Mapping[str, Any], where: str, *, some: bool = False) -> dict[str, float]:
    if some and not values:
        raise _wrong(where)
    return {_text(name, where): _number(value, f"{where}.{name}") for name, value in values.items()}


def _number(value: Any, where: str, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise _wrong(where)
    return float(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > 20_000:
        raise _wrong(where)
    return value


def _wrong(where: str) -> _Wrong:
    return _Wrong(printable(where, 200))
