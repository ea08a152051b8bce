"""SafeConsole: rich's console, on which no text is markup and none is obeyed by the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from grappe.errors.foreign_text import printable, printable_lines
from grappe.launch.terminal import UserStream

WIDTH = 200  # of tables that go into a file or a pipe


class SafeConsole(Console):
    """Prints each text, in a table's cell too, as one line of visible characters."""

    def __init__(self, stream: IO[str] | UserStream, **options: Any) -> None:
        super().__init__(file=cast(IO[str], stream), highlight=False, markup=False, emoji=False, **options)

    def lines(self, lines: Iterable[str]) -> None:
        """Prints each text on a line of its own."""
        for line in lines:
            self.print(line)

    def render_str(self, text: str, **options: Any) -> Text:
        plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
        return super().render_str(printable(text), **{**options, **plain})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own, to move the cursor
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)


def wide_console(stream: IO[str], *, soft_wrap: bool = False) -> SafeConsole:
    """A console as wide as the terminal, or wide enough for any table where `stream` is none."""
    return SafeConsole(stream, width=None if stream.isatty() else WIDTH, soft_wrap=soft_wrap)
