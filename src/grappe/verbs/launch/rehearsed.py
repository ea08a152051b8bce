"""Measurements of a script's rehearsal, and the lines of the script that they name; without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Rule = Literal["mean", "sum", "most", "least", "same"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """Result of a rehearsal, or the reason why the script cannot be spread."""

    refused: str = ""
    loader: str = ""
    """The lines that make and use the loader whose batches train."""
    losses: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    """By the place of the backward: how parts of the loss make up the whole's."""
    values: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    """By the place that reads a value."""
    lengths: Sequence[str] = ()
    """Places that are told the whole batch's rows: the gradient does not depend on them."""
    norms: Sequence[float] = ()
    """|gradient| of each parameter by the first batch's backwards before an optimizer steps."""
    structural: str = ""
    """A place that ended the rehearsal with an error when it was told the whole batch's rows; the next leaves it."""


def rehearsed_before(description: Mapping[str, Any], plan: str) -> Rehearsed | None:
    """Reads from a run's description what its first start's rehearsal has measured; None: not under this plan."""
    try:
        return Rehearsed(**description["rehearsed"]) if description.get("plan") == plan else None
    except (KeyError, TypeError):
        return None


def line_of(place: str) -> str:
    """Returns "train.py, line 41" of a place, of the last where it names several."""
    file, _, rest = place.rpartition(">")[2].rpartition("< ")[2].partition(":")
    return f"{Path(file).name}, line {rest.partition(':')[0]}"
