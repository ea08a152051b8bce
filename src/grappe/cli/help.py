"""Shows the command line's help: rare options in a box of their own, in the user's language."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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

from grappe.cli.application import FIRST, GROUPS
from grappe.language import catalogue_of, chosen_language

LABELS = ("[choices: ", "[env var: ", "[default: ", "[required]")
"""Labels that cyclopts writes after an option's help."""
USAGE = "Usage: "
COMMAND = "COMMAND"
PARAMETERS = "Parameters"
"""Title that cyclopts gives to options."""
OPTIONS = "Options"
ADVANCED_TITLE = "Advanced options"
ADVANCED = frozenset(re.findall(r"\S+", """
    --chain --constraint --dependency --epochs-done --log-samples --mail-user --mem-per-cpu --noise-scale --part
    --profile-after --profile-steps --requirements --reservation --restarts --sbatch --stall-limit --steps-only
    --stop-on-failed-save --trained --validation-batches --wheels --with --with-optimizer
"""))  # fmt: skip
"""Options that few need: the help has them in a box of their own."""

EXAMPLES_TITLE = "Examples"
EXAMPLES = """
    train digits epochs=3 --plan replicate=2
    train my_task.py lr=0.2 --run runs/first --patience 3
    drill digits --plan replicate=2
    verify digits --plan replicate=2 --plan shard=2,zero=2
    runs
    runs --race accuracy=0.97 --by time
    follow runs/first
    report runs/first runs/second --out report.html
    curves runs/first runs/second --out curves.csv
    prune --keep 1 --dry-run
    foresee my_task.py --site narval --gpus 1,4
    measure digits batch_size=64,256 --plan one --plan replicate=2
    measure digits --why
    lr-find digits --steps 60
    engines
    tasks digits
    gpus
    fetch cifar10 --data data --dry-run
    data index train.tar
    data check images/
    data pack images/ --out shards --short 256
    data stage shards --out /tmp/shards
    data bench shards
    queue
    logs runs/first --follow
    wait runs/first
    cancel runs/first
    sites narval
    doctor --plan shard=8
    evaluate runs/first --split test
    predict runs/first new.npy --out predicted.npy
    export runs/first --out program
    completion bash
"""
"""Commands that are shown at the end of a command's help; those whose docstring has some are not here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedHelp:
    """A formatter of cyclopts's help, with each text as `text` returns it."""

    text: Callable[[str], str]
    app: App
    all_commands: bool = False

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Shows a panel: commands, or options of one kind; rare options in a second panel."""
        entries = panel.entries
        if panel.title in GROUPS and not self.all_commands:
            entries = [entry for entry in entries if FIRST.intersection(entry.names)]
        rare = [entry for entry in entries if ADVANCED.intersection(entry.names)]
        usual = [entry for entry in entries if entry not in rare]
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
        words = itertools.takewhile(re.compile(r"[a-z][a-z-]*$").match, line.split()[1:])
        command = functools.reduce(lambda parent, word: parent[word], words, self.app)
        collection = command.assemble_argument_collection() if command.default_command else ()
        names = [f"[{each.name}]" for each in collection if each.field_info.is_positional and not each.required]
        for ending in ("...", ""):  # cyclopts has one word for all of them
            line = line.replace(f"[ARGS{ending}]", f"{' '.join(names)}{ending}")
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
        """Returns an entry's help, with the labels of texts like `[default: 3]` translated."""
        description = DescriptionRenderer()(entry)
        for text in description.texts if isinstance(description, InlineText) else ():
            if label := next((start for start in LABELS if text.plain.startswith(start)), ""):
                text.plain = self.text(label) + text.plain.removeprefix(label)
        return description

    def _translated(self, description: Any, *, one_line: bool = False) -> Any:
        """Translates each paragraph of a text, and joins its lines; commands, which are indented, keep their lines.

        Args:
            one_line: whether the text is one paragraph, whatever its lines in the source.
        """
        shown = description.primary_renderable if isinstance(description, InlineText) else description
        if not isinstance(shown, Text) or not shown.plain:
            return description
        paragraphs = [" ".join(shown.plain.split())] if one_line else shown.plain.split("\n\n")
        texts = map(self.text, paragraphs)
        parts = "\n\n".join(text if "\n " in f"\n{text}" else " ".join(text.split()) for text in texts)
        return InlineText(Text(parts), force_empty_end=getattr(description, "force_empty_end", False))


def set_formatter(app: App, language: str | None = None, *, all_commands: bool = False) -> None:
    """Makes `app` show its help in a language, the user's by default, with examples at the end."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = catalogue_of(language or chosen_language(), encoding).text
    app.help_formatter = TranslatedHelp(text=text, app=app, all_commands=all_commands)
    for name, lines in examples().items():
        if name.partition(" ")[0] not in app:
            continue
        command = functools.reduce(lambda parent, word: parent[word], name.split(), app)
        command.help_epilogue = "\n".join([f"{text(EXAMPLES_TITLE)}:", *(f"  {line}" for line in lines)])


def examples() -> dict[str, list[str]]:
    """Returns the examples of each command: {"data pack": ["grappe data pack images/ --out shards --short 256"]}."""
    by_command: dict[str, list[str]] = {}
    for line in EXAMPLES.split("\n    ")[1:]:
        words = line.split()
        by_command.setdefault(" ".join(words[: 1 + (words[0] == "data")]), []).append(f"grappe {line.strip()}")
    return by_command
