"""Lines of text on what was gathered between the processes of a context."""

from __future__ import annotations

from grappe.rows.context import RowsContext


def lines(context: RowsContext, *, most: int = 10) -> list[str]:
    """Returns a line for each operator and place that were gathered, the most frequent first."""
    return [f"{at.line}: {at.operator}: {count:,} times" for at, count in context.gathered.most_common(most)]
