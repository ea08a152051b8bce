"""The table of foreseen and measured memory and steps, its sentences, and its files of JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from grappe.errors.foreign_text import spreadsheet_cell
from grappe.verbs.foresee.history import NAMES, Compared, Errors
from grappe.verbs.foresee.out import check_out, write_out
from grappe.words import format_bytes, format_seconds

OF_EACH = ("measured", "error")
COLUMNS = ("run", "plan", "states foreseen", *OF_EACH, "peak foreseen", *OF_EACH, "step foreseen", *OF_EACH)


def table(found: Sequence[Compared]) -> Table:
    """Makes the table: a row for each run of which something is known."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        made.add_column(column, overflow="fold")
    for one in found:
        if one.states is not None:
            made.add_row(
                one.run,
                one.plan or "one process",
                *(_size(one.states), _size(one.states_measured), _percent(one.states_error)),
                *(_size(one.peak), _size(one.peak_measured), _percent(one.peak_error)),
                *(_seconds(one.step), _seconds(one.step_measured), _percent(one.step_error)),
            )
    return made


def sentences(found: Sequence[Compared], errors: Sequence[Errors]) -> list[str]:
    """Says the errors over all runs, and why runs, or their steps, are missing."""
    lines = [
        f"{one.what}: off by {_percent(one.median, '')} in the median of {one.runs} runs, 95th percentile "
        f"{_percent(one.high, '')}, worst {_percent(one.worst, '')}"
        for one in errors
    ]
    without = Counter(one.step_why for one in found if one.step_why)
    for why, runs in without.items():
        lines.append(f"the step of {runs} run{'s' if runs > 1 else ''} is not foreseen: {why}")
    return [*lines, *(f"{one.run}: {one.why}" for one in found if one.why)]


def write(found: Sequence[Compared], errors: Sequence[Errors], file: Path) -> None:
    """Writes all of it as JSON, or as CSV if that is how the file's name ends.

    Raises:
        UsageError: the name ends otherwise, or the file cannot be written.
    """
    check_out(file, history=True)
    if file.suffix == ".json":
        content = {"kind": "foreseen", "runs": [one.as_json() for one in found]}
        text = json.dumps({**content, "errors": [dataclasses.asdict(one) for one in errors]}, indent=1) + "\n"
    else:
        text = _csv(found)
    write_out(file, text)


def _csv(found: Sequence[Compared]) -> str:
    rows = []
    for one in found:
        row = one.as_json()
        parts = row.pop("foreseen")
        rows.append(row | {f"foreseen_{name}": parts.get(name) for name in NAMES})
    stream = io.StringIO()
    writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: spreadsheet_cell(value) for name, value in row.items()} for row in rows)
    return stream.getvalue()


def _seconds(value: float | None) -> str:
    return "?" if value is None else format_seconds(value)


def _size(value: int | None) -> str:
    return "?" if value is None else format_bytes(value)


def _percent(value: float | None, sign: str = "+") -> str:
    return "?" if value is None else f"{100 * value:{sign}.2f} %"
