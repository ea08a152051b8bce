"""Requests to a script's processes, and the measurements of its rehearsal; without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Rule = Literal["mean", "counted", "sum", "most", "least", "same", "rows", "first", "own"]
"""How parts make up the whole, element by element; "counted": a mean over what the last cross-entropy counts, tokens
say; "rows": one after the other; "first": the value of process 0's rows is the whole's; "own": it is not, but a
library reads it, for a picture."""
USED = " -> "
"""Stands in a place between where a name gets a length and where the name is used, or after the former."""
OR = " | "
"""Stands between several places where a name gets a length."""
INTERRUPTED = 130
"""The exit code of a Python script that Ctrl-C ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """Result of a rehearsal, or the reason why the script cannot be spread."""

    refused: str = ""
    ended: int | None = None
    """The exit code of a script that ended before it trained, as with --help; None: it trains."""
    loader: str = ""
    """The lines that make and use the loader whose batches train."""
    losses: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    """By the place of the backward: how parts of the loss make up the whole's."""
    values: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    """By the place that reads a value."""
    lengths: Sequence[str] = ()
    """Places that are told the whole batch's rows: the gradient does not depend on them."""
    counts: Sequence[str] = ()
    """Places that are told the sum of what the processes count there: rows that a mask chooses, say."""
    own_counts: Sequence[str] = ()
    """Places that count what adds up to no count of the whole batch: different classes, say."""
    parts_counts: Sequence[str] = ()
    """Places that are told what they count of the part: it makes a tensor, or the gradient depends on it."""
    own_rows: Sequence[str] = ()
    """Lines that print, and variables that count, the rows of a process, where one process has the whole batch's."""
    norms: Sequence[float] = ()
    """|gradient| of each parameter by the first batch's backwards before an optimizer steps."""
    drawn: str = ""
    """A digest of the random state after the first batch; "": it is another under the plan's keys."""
    models: Sequence[str] = ()
    """Names of the models that a step calls: see `plan_keys`."""
    keys: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By the plan's key: |gradient - plain one| / |plain one| of the first batch."""
    structural: str = ""
    """A place that ended the rehearsal with an error when it was told the whole batch's rows; the next leaves it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A script and the plan of the processes that run it."""

    script: Path
    arguments: Sequence[str]
    plan: str
    """"" for one process."""
    rendezvous: Mapping[str, str]
    """MASTER_ADDR and MASTER_PORT, for a script that calls torch.distributed itself."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of the environment, for any process."""
    seed: int = 0
    """Of what the script draws before it seeds itself, the same in all processes."""
    rehearsed: Rehearsed | None = None
    """Measurements of an unedited script's rehearsal."""
    run: Path | None = None
    """Folder of the run of a script for one process; None: it becomes none."""
    steps: int | None = None
    """Steps after which it ends, as a measurement does, which leaves no file; None: it ends by itself."""
    save_every: int | None = None
    check_every: int | None = None
    catches: bool = False
    """Whether the script does something of its own on Ctrl-C."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsalRequest:
    """A script that is to be rehearsed."""

    script: ScriptRequest
    structural: Sequence[str]
    """Places whose number of rows makes a tensor, as earlier rehearsals have found."""


def rehearsed_before(description: Mapping[str, Any], plan: str) -> Rehearsed | None:
    """Reads from a run's description what its first start's rehearsal has measured; None: not under this plan."""
    try:
        return Rehearsed(**description["rehearsed"]) if description.get("plan") == plan else None
    except (KeyError, TypeError):
        return None


def line_of(place: str) -> str:
    """Returns "train.py, line 41" of a place, of the last where it names several."""
    file, _, rest = place.rpartition(">")[2].rpartition("< ")[2].removesuffix(USED).rpartition(USED)[2].partition(":")
    return f"{Path(file).name}, line {rest.partition(':')[0]}"
