"""Defines grappe verify, which compares plans with one plain process."""

from __future__ import annotations

import json as jsons
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from grappe.cli.arguments import DataFolder, FieldText, TaskName
from grappe.cli.exit import show
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.launch.terminal import progress
from grappe.words import plain_table


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
    from grappe.verbs.verify import report
    from grappe.verbs.verify import verify as verb

    note = progress
    findings = list(verb.verify(task, plan, fields=texts, data=data, steps=steps, note=note))
    note("")
    sys.stderr.flush()
    table = plain_table(*report.COLUMNS)
    for finding in findings:
        table.add_row(*report.cells(finding))
    show(table)
    if json is not None:
        json.write_text(jsons.dumps([report.as_json(finding) for finding in findings], indent=1) + "\n")
    if html is not None:
        html.write_text(report.page(task, findings))
    return EXIT_OK if all(finding.learns_the_same for finding in findings) else EXIT_FAILURE
