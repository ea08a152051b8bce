"""Finding: what is wrong, why it matters, and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from grappe.launch.rank import ProcessRank
from grappe.plan import Plan

Level = Literal["error", "warning", "note"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem or a fact that a check found. An error would end the training; a warning costs time or numbers."""

    level: Level
    what: str
    why: str = ""
    do: str = ""
    host: str = ""
    """The node, where several were examined."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine, process and plan that are examined."""

    process: ProcessRank
    plan: Plan
    folder: Path
    """Where the run writes."""
    job: bool
    """Whether this is the first step of a job."""
    environment: Mapping[str, str]
    task: str | None = None
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_node_leader(self) -> bool:
        """Whether this process is the first on its node: a node's own state is examined once."""
        return self.process.local_rank == 0


def error(what: str, why: str = "", do: str = "") -> Finding:
    """A finding that would end the training."""
    return Finding(level="error", what=what, why=why, do=do)


def warning(what: str, why: str = "", do: str = "") -> Finding:
    """A finding that costs time or numbers."""
    return Finding(level="warning", what=what, why=why, do=do)


def note(what: str, why: str = "", do: str = "") -> Finding:
    """Something to know."""
    return Finding(level="note", what=what, why=why, do=do)
