"""The doctor's checks, recognised by file name: to add a check, add one file with `check(machine)`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from grappe.launch.rank import ProcessRank
from grappe.plan import Plan

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

    @property
    def is_node_leader(self) -> bool:
        """Returns whether this process is the first on its node, which alone examines the node's state."""
        return self.process.local_rank == 0


def error(what: str, *, why: str = "", do: str = "") -> Finding:
    """Makes a finding that would end the training."""
    return Finding(level="error", what=what, why=why, do=do)


def warning(what: str, *, why: str = "", do: str = "") -> Finding:
    """Makes a finding that costs time or accuracy."""
    return Finding(level="warning", what=what, why=why, do=do)


def note(what: str, *, why: str = "", do: str = "") -> Finding:
    """Makes a finding that is only information."""
    return Finding(level="note", what=what, why=why, do=do)


def names() -> list[str]:
    """Lists the checks."""
    return sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py"))


def examine(machine: Machine) -> Iterator[Finding]:
    """Runs every check; an exception in a check becomes a finding, and the other checks still run."""
    for name in names():
        try:
            yield from importlib.import_module(f"{__name__}.{name}").check(machine)
        except Exception as mistake:
            yield warning(f"the check {name} failed: {type(mistake).__name__}: {mistake}")
