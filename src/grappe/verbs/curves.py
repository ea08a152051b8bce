"""grappe curves: the curves of runs as CSV, one line per step and one per evaluation."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from grappe.errors import RunError
from grappe.errors.foreign_text import spreadsheet_cell
from grappe.training.run import Run

MOST_COLUMNS = 10_000
FIRST = ("run", "kind", "step", "epoch", "samples", "loss")


def write_csv(places: Sequence[Path | str], stream: IO[str]) -> int:
    """Writes the curves of runs to `stream`; returns the number of lines, without the heading.

    Raises:
        RunError: one of the folders is no run.
    """
    runs = [Run(place) for place in places]
    names = dict.fromkeys(FIRST)
    for run in runs:
        for record in run.records():
            names |= dict.fromkeys(record)
            if len(names) > MOST_COLUMNS:
                raise RunError(
                    f"{run.folder}: its curves have more than {MOST_COLUMNS:,} names, and are damaged"
                )
    writer = csv.DictWriter(stream, names, extrasaction="ignore", lineterminator="\n")
    writer.writerow({name: spreadsheet_cell(name) for name in names})
    lines = 0
    for run in runs:
        for record in run.records():
            cells = {"run": run.folder.name, **record}
            writer.writerow({name: spreadsheet_cell(value) for name, value in cells.items()})
            lines += 1
    return lines
