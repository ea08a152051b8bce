"""grappe curves: the curves of runs as CSV, one line per step and one per evaluation."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from grappe.training.run import Run

FIRST = ("run", "kind", "step", "epoch", "samples", "loss")


def write_csv(places: Sequence[Path | str], stream: IO[str]) -> int:
    """Writes the curves of runs to `stream`; returns the number of lines, without the heading.

    Raises:
        RunError: one of the folders is no run.
    """
    runs = [Run(place) for place in places]
    names = list(FIRST)
    for run in runs:
        for record in run.records():
            names += [name for name in record if name not in names]
    writer = csv.DictWriter(stream, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    lines = 0
    for run in runs:
        for record in run.records():
            writer.writerow(
                {"run": run.folder.name, **{name: _cell(value) for name, value in record.items()}}
            )
            lines += 1
    return lines


def _cell(value: Any) -> Any:
    """Formats a cell; a list, such as accuracies by class, is joined by spaces."""
    return " ".join(str(one) for one in value) if isinstance(value, list) else value
