"""Report: findings as rows of a table, as JSON, and as one HTML page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from grappe.errors.foreign_text import html_text
from grappe.verbs.verify.judge import Finding

COLUMNS = ("plan", "verdict", "first differs", "loss", "gradient norm", "weights", "tolerated", "why")


def cells(found: Finding) -> list[str]:
    """Makes a row under COLUMNS; differences are relative."""
    gap = found.difference
    why = "; ".join([*found.causes, *found.notes])
    if gap is None:
        return [found.plan or "one process", found.verdict, "", "", "", "", "", why]
    first = "" if gap.first is None else f"step {gap.first + 1} ({', '.join(gap.what)})"
    norm = "" if gap.norm is None else f"{gap.norm:.1e}"
    weights = f"{gap.weights:.1e}" + (f" ({gap.tensor})" if gap.tensor else "")
    return [
        found.plan or "one process", found.verdict, first, f"{gap.loss:.1e}", norm, weights,
        f"{gap.tolerance:.1e}", why,
    ]  # fmt: skip


def as_json(found: Finding) -> dict[str, Any]:
    """Converts all findings to JSON; NaN and infinities become null."""
    return _plain(dataclasses.asdict(found))


def page(task: str, findings: Sequence[Finding]) -> str:
    """Renders one HTML page that needs no other file."""
    parts = [f"<h1>grappe verify {html_text(task)}</h1>", _rows(COLUMNS, [cells(one) for one in findings])]
    for one in findings:
        names = ("loss", "loss tolerated", "norm", "norm tolerated", "weights", "weights tolerated")
        rows = [
            [str(number), *(f"{step[name]:.1e}" for name in names)]
            for number, step in enumerate(one.difference.steps if one.difference else (), start=1)
        ]
        parts.append(f"<h2>{html_text(one.plan or 'one process')}</h2>{_rows(('step', *names), rows)}")
    style = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>grappe verify</title><style>{style}</style>'
    return f"{head}{''.join(parts)}</html>\n"


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html_text(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(columns, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and value - value != 0 else value
