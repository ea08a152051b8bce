"""Table: rows with named columns, for pandas and for a notebook's cell; the base class of results that have one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from grappe.errors.foreign_text import html_text, printable
from grappe.words import format_number

MOST_ROWS, MOST_COLUMNS, MOST_OF_CELL = 20, 24, 120  # that a cell of a notebook shows


class Table:
    """Rows with named columns, used as a DataFrame is where pandas is not installed: `table["loss"]` is a column."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.rows = [dict(row) for row in rows]
        self.columns = list(dict.fromkeys(name for row in self.rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __getitem__(self, column: str) -> list[Any]:
        if column not in self.columns:
            raise KeyError(column)
        return [row.get(column) for row in self.rows]

    def to_pandas(self) -> Any:
        """Returns the table as a pandas.DataFrame, or raises ImportError."""
        import pandas

        return pandas.DataFrame(self.rows, columns=self.columns)

    def __repr__(self) -> str:
        return f"Table({len(self)} x {len(self.columns)}: {printable(', '.join(self.columns), MOST_OF_CELL)})"

    def _repr_html_(self) -> str:
        """Shows the first and last rows; a single row as names and values. All text is escaped."""
        columns = self.columns[:MOST_COLUMNS]
        if len(self) == 1:
            return html_rows([(f"<b>{_cell(name)}</b>", _cell(self.rows[0][name])) for name in columns])
        half = MOST_ROWS // 2
        hidden = len(self) - MOST_ROWS
        shown = (
            self.rows if hidden <= 0 else [*self.rows[:half], {columns[0]: f"… {hidden:,} more"}, *self.rows[-half:]]
        )
        cells = [[_cell(row.get(name)) for name in columns] for row in shown]
        return html_rows([[f"<b>{_cell(name)}</b>" for name in columns], *cells])


class Tabular:
    """A result that a notebook shows as a table."""

    def table(self) -> Table:
        """Returns the result's figures as a table."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Returns the result's figures as a pandas.DataFrame, or raises ImportError."""
        return self.table().to_pandas()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Returns a pandas.DataFrame where pandas is installed, else a Table with the same columns."""
    table = Table(rows)
    try:
        return table.to_pandas()
    except ImportError:
        return table


def html_rows(rows: Iterable[Iterable[str]]) -> str:
    """Makes an HTML table of cells that are HTML already; colours are the page's, light or dark."""
    lines = ("".join(f'<td style="text-align:left">{cell}</td>' for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="color:inherit">{body}</table>'


def _cell(value: object) -> str:
    if value is None or value != value:  # noqa: PLR0124 - NaN alone differs from itself
        return ""
    return html_text(format_number(value) if isinstance(value, float) else printable(value, MOST_OF_CELL))
