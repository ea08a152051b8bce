"""Shows the command line's help: rare options in a box of their own, in the user's language."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any

from cyclopts import App
from cyclopts.help import ColumnSpec, DefaultFormatter, DescriptionRenderer, HelpEntry, HelpPanel, InlineText
from cyclopts.help.protocols import ColumnSpecBuilder
from cyclopts.help.specs import get_default_command_columns, get_default_parameter_columns
from rich.console import Console, ConsoleOptions
from rich.text import Text

from grappe.language import catalogue_of
from grappe.language.choice import chosen_language

LABELS = ("[choices: ", "[env var: ", "[default: ", "[required]")
"""What cyclopts writes behind an option's help."""
USAGE = "Usage: "
COMMAND = "COMMAND"
PARAMETERS = "Parameters"
"""What cyclopts calls options."""
OPTIONS = "Options"
ADVANCED_TITLE = "Advanced options"
ADVANCED = frozenset(re.findall(r"\S+", """
    --chain --constraint --dependency --epochs-done --log-samples --mail-user --mem-per-cpu --noise-scale --part
    --profile-after --profile-steps --requirements --reservation --restarts --sbatch --stall-limit --steps-only
    --stop-on-failed-save --trained --validation-batches --wheels --with --with-optimizer
"""))  # fmt: skip
"""Options that few need: the help has them in a box of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedHelp:
    """A formatter of cyclopts's help, with each text as `text` returns it."""

    text: Callable[[str], str]

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Shows a panel: commands, or options of one kind; rare options in a second panel."""
        rare = [entry for entry in panel.entries if ADVANCED.intersection(entry.names)]
        usual = [entry for entry in panel.entries if entry not in rare]
        title = OPTIONS if panel.title == PARAMETERS else str(panel.title)
        rare_title = ADVANCED_TITLE if title == OPTIONS else f"{title}: advanced"
        for name, entries in ((title, usual), (rare_title, rare)):
            if entries:
                texts = [
                    entry.copy(description=self._translated(entry.description, one_line=True)) for entry in entries
                ]
                DefaultFormatter(column_specs=self._columns(panel))(
                    console, options, panel.copy(title=self.text(name), entries=texts)
                )

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Shows the line that says how a command is written."""
        line = str(usage).replace(f" {COMMAND}", f" {self.text(COMMAND)}")
        console.print(Text(f"{self.text(USAGE)}{line}", style="bold"))

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Shows what a command does."""
        if description:
            console.print(self._translated(description))

    def _columns(self, panel: HelpPanel) -> ColumnSpecBuilder:
        """Returns cyclopts's columns for a panel, with translated labels in the last one."""
        usual = get_default_command_columns if panel.format == "command" else get_default_parameter_columns

        def columns(console: Console, options: ConsoleOptions, entries: list[HelpEntry]) -> tuple[ColumnSpec, ...]:
            *others, description = usual(console, options, entries)
            return (*others, description.copy(renderer=self._described))

        return columns

    def _described(self, entry: HelpEntry) -> Any:
        description = DescriptionRenderer()(entry)
        if isinstance(description, InlineText):
            description.texts = [self._labelled(text) for text in description.texts]
        return description

    def _labelled(self, text: Text) -> Text:
        """A text like `[default: 3]` with its label translated."""
        label = next((start for start in LABELS if text.plain.startswith(start)), "")
        return Text(self.text(label) + text.plain.removeprefix(label), text.style) if label else text

    def _translated(self, description: Any, *, one_line: bool = False) -> Any:
        """A text of help, each paragraph translated; with `one_line` the source's line breaks are no breaks."""
        shown = description.primary_renderable if isinstance(description, InlineText) else description
        if not isinstance(shown, Text) or not shown.plain:
            return description
        parts = "\n\n".join(map(self.text, shown.plain.split("\n\n")))
        parts = " ".join(parts.split()) if one_line else parts
        return InlineText(Text(parts), force_empty_end=getattr(description, "force_empty_end", False))


def set_formatter(app: App) -> None:
    """Makes `app` show its help in the user's language."""
    texts = catalogue_of(chosen_language(), getattr(sys.stdout, "encoding", None) or "utf-8")
    app.help_formatter = TranslatedHelp(text=texts.text)
