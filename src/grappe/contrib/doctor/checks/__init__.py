"""The doctor's checks: to add one, write a function `check_NAME(machine)` into the file of its subject."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from grappe.launch.rank import ProcessRank
from grappe.plan import Plan

PREFIX = "check_"
Level = Literal["error", "warning", "note"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem or a fact that a check found. An error would end the training; a warning costs time or accuracy."""

    level: Level
    what: str
    why: str = ""
    do: str = ""
    host: str = ""
    """The node's name, if several were examined."""
    of_node: bool = False
    """Whether it is a fault of the node's, which a job notes against it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """The input of an examination's processes."""

    plan: Plan
    folder: Path
    """The folder in which the run writes."""
    job: bool = False
    """Whether this is the first step of a job."""
    task: str | None = None
    script: Path | None = None
    """A script of the user's own, which the job runs."""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine(DoctorRequest):
    """The machine, process and plan that are examined."""

    process: ProcessRank
    environment: Mapping[str, str]


Check = Callable[[Machine], Iterable[Finding]]


def of_level(level: Level, what: str, *, why: str = "", do: str = "") -> Finding:
    """Makes a finding of a level."""
    return Finding(level=level, what=what, why=why, do=do)


def error(what: str, *, why: str = "", do: str = "") -> Finding:
    """Makes a finding that would end the training."""
    return of_level("error", what, why=why, do=do)


def warning(what: str, *, why: str = "", do: str = "") -> Finding:
    """Makes a finding that costs time or accuracy."""
    return of_level("warning", what, why=why, do=do)


def note(what: str, *, why: str = "", do: str = "") -> Finding:
    """Makes a finding that is only information."""
    return of_level("note", what, why=why, do=do)


def once(check: Check) -> Check:
    """Decorator of a check that only the first of all processes runs."""
    return functools.wraps(check)(lambda machine: () if machine.process.rank else check(machine))


def once_a_node(check: Check) -> Check:
    """Decorator of a check that only the first process of each node runs."""
    return functools.wraps(check)(lambda machine: () if machine.process.local_rank else check(machine))


def examine(machine: Machine) -> Iterator[Finding]:
    """Runs every check; an exception in a check becomes a finding, and the other checks still run."""
    for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        checks = dict[str, Check]()
        try:
            functions = vars(importlib.import_module(f"{__name__}.{file.stem}"))
            checks = {name.removeprefix(PREFIX): functions[name] for name in functions if name.startswith(PREFIX)}
        except Exception as mistake:  # a library that the checks import is broken
            yield _failed(file.stem, mistake)
        for name, check in checks.items():
            try:
                yield from check(machine)
            except Exception as mistake:
                yield _failed(name, mistake)


def _failed(name: str, mistake: Exception) -> Finding:
    return warning(f"the check {name} failed: {type(mistake).__name__}: {mistake}")
