"""SafeConsole: rich's console, on which no text is markup and none is obeyed by the terminal."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from grappe.errors.foreign_text import printable, printable_lines
from grappe.language import translated_cell, translated_name
from grappe.launch.terminal import UserStream
from grappe.words import plain_table

WIDTH = 200  # of tables that go into a file or a pipe
FOLDED = 16  # characters that a column has at least, if its cells are as long; longer ones are folded


class SafeConsole(Console):
    """Prints each text, in a table's cell too, as one line of visible characters, in the user's language.

    A rich Text, as of a log's line, has one language.
    """

    def __init__(self, stream: IO[str] | UserStream, **options: Any) -> None:
        super().__init__(file=cast(IO[str], stream), highlight=False, markup=False, emoji=False, **options)

    def lines(self, lines: Iterable[str | Text]) -> None:
        """Prints each text on a line of its own."""
        for line in lines:
            self.print(line)

    def render_str(self, text: str, **options: Any) -> Text:
        text = translated_cell(text, self.file)
        plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
        return super().render_str(printable(text), **{**options, **plain})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Table):
            for column in renderable.columns:
                if isinstance(column.header, str):
                    column.header = Text(translated_name(column.header, self.file))
            if self.is_terminal:
                renderable = self._narrowed(renderable, options or self.options)
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own, to move the cursor
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)

    def _narrowed(self, table: Table, options: ConsoleOptions) -> RenderableType:
        """Returns a table that the terminal is too narrow for as several, each with the first column and some others.

        Columns stand in the order of their importance.
        """
        wide = options.update(width=WIDTH)
        needs = [
            2 + max(Measurement.get(self, wide, cell).maximum for cell in (column.header, *column.cells))
            for column in table.columns
        ]
        for index, column in enumerate(table.columns):
            needs[index] = needs[index] if column.no_wrap else min(needs[index], FOLDED + 2)
        blocks = [[0]]
        for index in range(1, len(needs)):
            if len(blocks[-1]) > 1 and sum(needs[each] for each in (*blocks[-1], index)) > options.max_width:
                blocks.append([0])
            blocks[-1].append(index)
        if len(blocks) == 1:
            return table
        tables = list[RenderableType]()
        for block in blocks:
            narrow = Table(box=None, show_header=table.show_header, padding=(0, 2, 0, 0))
            narrow.columns = [dataclasses.replace(table.columns[each], _index=at) for at, each in enumerate(block)]
            narrow.rows = table.rows
            tables += [*[""] * bool(tables), narrow]
        return Group(*tables)


def fact_table(facts: Iterable[tuple[str, object]]) -> Table:
    """Makes a table of two columns without a header: what it is, in the user's language, and its value."""
    table = plain_table()
    for name, value in facts:
        table.add_row(translated_name(name, sys.stdout), str(value))
    return table


def wide_console(stream: IO[str]) -> SafeConsole:
    """A console as wide as the terminal, or wide enough for any table where `stream` is none."""
    return SafeConsole(stream, width=None if stream.isatty() else WIDTH)
