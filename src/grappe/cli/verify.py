"""Defines grappe verify, and shows its verdicts: as rows of a table, as JSON, and as one HTML page."""

from __future__ import annotations

import dataclasses
import json as jsons
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from grappe.cli.arguments import DataFolder, FieldText, TaskName
from grappe.cli.exit import show
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.errors.foreign_text import html_text
from grappe.launch.terminal import progress
from grappe.words import plain_table

if TYPE_CHECKING:
    from grappe.verbs.verify.verdict import PlanVerdict


COLUMNS = ("plan", "verdict", "first differs", "loss", "gradient norm", "weights", "tolerated", "why")


def register(app: App) -> None:
    """Adds the command to `app`."""
    app.command(verify)


def verify(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: Annotated[list[str] | None, Parameter(negative="", help="A plan to compare; repeatable.")] = None,
    steps: Annotated[int, Parameter(help="Optimizer steps of each trial.")] = 8,
    json: Annotated[Path | None, Parameter(help="Write the findings to this JSON file.")] = None,
    html: Annotated[Path | None, Parameter(help="Write them to this HTML file.")] = None,
    data: DataFolder = None,
) -> int:
    """Check that plans learn what one plain process learns; if one does not, name the cause and exit with code 1."""
    from grappe.cli.preflight import preflight
    from grappe.fields import split

    if not plan:
        raise UsageError("grappe verify needs a plan: give --plan replicate=2, once for each plan")
    texts = split(fields)
    preflight(plan, task)
    from grappe.verbs.verify import verify as verb

    note = progress
    findings = list(verb.verify(task, plan, fields=texts, data=data, steps=steps, note=note))
    note("")
    sys.stderr.flush()
    table = plain_table(*COLUMNS)
    for finding in findings:
        table.add_row(*verdict_cells(finding))
    show(table)
    if json is not None:
        json.write_text(jsons.dumps([as_json(finding) for finding in findings], indent=1) + "\n")
    if html is not None:
        html.write_text(html_page(task, findings))
    return EXIT_OK if all(finding.learns_the_same for finding in findings) else EXIT_FAILURE


def verdict_cells(finding: PlanVerdict) -> list[str]:
    """Makes a row under COLUMNS; differences are relative."""
    gap = finding.difference
    why = "; ".join([*finding.causes, *finding.notes])
    if gap is None:
        return [finding.plan or "one process", finding.verdict, "", "", "", "", "", why]
    first = "" if gap.first is None else f"step {gap.first + 1} ({', '.join(gap.what)})"
    norm = "" if gap.norm is None else f"{gap.norm:.1e}"
    weights = f"{gap.weights:.1e}" + (f" ({gap.tensor})" if gap.tensor else "")
    return [
        finding.plan or "one process", finding.verdict, first, f"{gap.loss:.1e}", norm, weights,
        f"{gap.tolerance:.1e}", why,
    ]  # fmt: skip


def as_json(finding: PlanVerdict) -> dict[str, Any]:
    """Converts all findings to JSON; NaN and infinities become null."""
    return _plain(dataclasses.asdict(finding))


def html_page(task: str, findings: Sequence[PlanVerdict]) -> str:
    """Renders one HTML page that needs no other file."""
    cells = [verdict_cells(finding) for finding in findings]
    parts = [f"<h1>grappe verify {html_text(task)}</h1>", _rows(COLUMNS, cells)]
    for finding in findings:
        names = ("loss", "loss tolerated", "norm", "norm tolerated", "weights", "weights tolerated")
        rows = [
            [str(number), *(f"{step[name]:.1e}" for name in names)]
            for number, step in enumerate(finding.difference.steps if finding.difference else (), start=1)
        ]
        parts.append(f"<h2>{html_text(finding.plan or 'one process')}</h2>{_rows(('step', *names), rows)}")
    style = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>grappe verify</title><style>{style}</style>'
    return f"{head}{''.join(parts)}</html>\n"


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(texts: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html_text(cell)}</{tag}>" for cell in texts) + "</tr>"

    return f"<table>{line(columns, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value
