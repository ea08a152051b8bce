"""Lists the texts that are not in the sources' messages: the help, remedies, and what cyclopts and the system say."""

from __future__ import annotations

import errno
import functools
import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from cyclopts import App
from rich.console import Console

from grappe import fields, finder, sites
from grappe.cli import help as translated_help
from grappe.cli.commands import app
from grappe.contrib.lab.breakdown import RULES, SMALL_BATCH, USEFUL
from grappe.errors.remedies import REMEDIES
from grappe.language import STATES
from grappe.language.catalogue import NAME
from grappe.plan import Plan
from grappe.profiling.phases import PHASES
from grappe.sites.schema import Site
from grappe.verbs.foresee import tables
from grappe.verbs.report import report
from grappe.verbs.report.report import MARK, WORD

CYCLOPTS = (
    'Command "{command}" parameter {option} requires an argument.',
    'Command "{command}" parameter {option} requires an argument. Did you mean {other} instead of {given}?',
    'Command "{command}" parameter {option} requires {count} positional arguments.',
    'Command "{command}" parameter {option} requires {count} positional arguments. Only got {found}.',
    "Parameter {option} requires an argument.",
    "Parameter {option} specified multiple times.",
    'Invalid value "{value}" for {option}. Choose from: {choices}.',
    'Invalid value "{value}" for {option}. Choose from: {choices}. Did you mean "{other}"?',
    'Invalid value for {option}: unable to convert "{value}" into {kind}.',
    "Cannot supply keyword & non-keyword arguments to {option}.",
)
"""What the parser of the command line says: cyclopts has no translations. tests/cli/test_help.py makes it say them."""
SYSTEM = ("ENOENT", "EACCES", "EPERM", "ENOSPC", "EDQUOT", "EISDIR", "ENOTDIR", "EEXIST", "EROFS", "EIO", "ENOTEMPTY")
"""Errors of files, as the system calls them."""
LINES = ("{file}, line {number}, in {function}()", "{file}, line {number}, in {function}(): {text}")
LINES += ("  why: {why}", "  do:  {why}", "ERROR: {what}", "warning: {what}", "note: {what}")
"""Lines of the user's code, which a `__str__` writes of which the sources' messages know nothing, and of doctor."""
RESULTS = ("{number} ({number2} of {number3})", "{name} (newest)")
RESULTS += ("{name} (as asked)", "{name} (best: validation loss {number})")
RESULTS += (
    "{state} ✓",
    "{seconds} s: {parts}",
    "learning rate",
    "up to {number}x",
    "--no-build was given",
    "{number} of {number2}: {plan_name}",
    "a mean over rows ({places})",
    "a sum over rows ({places})",
    "{number} core-hours",
    "{number} GPU-hours",
    "energy of processors not measurable here",
)
RESULTS += (
    "loss {number}",
    "best: trial {number}, loss {number2}, {folder}",
    "validation {score}",
    "validation loss",
    "training {score}",
    "training loss",
    "field {name}: {value} -> {value2}",
    "plan: {plan} -> {plan2}",
    "processes: {number} -> {number2}",
    "threads: {number} -> {number2}",
    "device: {name} -> {name2}",
    "dataset: {name} -> {name2}",
    "restart {number} at step {step}: {change}",
    "step {number} ({parts})",
    "no Slurm here: {why}",
    "folders without a picture {number} ({name})",
    "validation (the test set) {score}",
)
"""Cells and names of rows that are put together of values with hardly a word between."""
METER = ("checking", "packing", "copying", "fetching {name}", "images", "bytes")
"""What a meter of grappe.verbs.data.walk says that it does, and to what: its own line has places for them."""
REPORT = Path(report.__file__).parent
"""The folder of the report's page, whose words are in catalogues behind a mark."""
GROUP = re.compile(r"\\(\d)")
URL = re.compile(r"https?://\S+$")
DIGITS = re.compile(r"\d[\d,]*")


def others() -> dict[str, set[str]]:
    """Returns the templates, each with the file that it is from."""
    found = {text: {"the help"} for text in help_texts()}
    found |= {text: {"cyclopts"} for text in CYCLOPTS}
    found |= {GROUP.sub(r"{part\1}", text): {"grappe/errors/remedies.py"} for text in REMEDIES.values()}
    found |= {os.strerror(getattr(errno, name)): {"the system"} for name in SYSTEM}
    found |= {text: {"grappe/errors/user_code.py"} for text in LINES}
    found |= {text: {"grappe/verbs/data/walk.py"} for text in METER}
    found |= {text: {"results"} for text in RESULTS}
    found |= {text: {"grappe/contrib/lab/breakdown.py"} for text in (*RULES, SMALL_BATCH, USEFUL)}
    for file in sorted(REPORT.glob("p*.*")):
        found |= {
            MARK + match["word"]: {f"grappe/verbs/report/{file.name}"} for match in WORD.finditer(file.read_text())
        }
    found |= {text: {"grappe/language/__init__.py"} for text in STATES}
    found |= {text.removesuffix("."): {"grappe/plan.py"} for text in fields.docs(Plan).values()}
    found |= {finder.describe(finder.find(name)): {"the tasks"} for name in finder.names()}
    found |= {text: {"the sites"} for name in sites.files() for text in site_texts(sites.find(name))}
    found |= {NAME.format(text): {"grappe/profiling/phases.py"} for text in PHASES}
    columns = {*tables.SHORT, *tables.MEMORY_PARTS, *tables.TIME_PARTS, "rest"}
    found |= {NAME.format(text): {"grappe/verbs/foresee/tables.py"} for text in columns if " " not in text}
    found |= {"kWh at most": {"grappe/verbs/foresee/tables.py"}}
    return {**found, " or ": {"grappe/errors/__init__.py"}, " to ": {"grappe/words.py"}}


def site_texts(site: Site) -> Iterator[str]:
    """Yields the words of a site's file, without their numbers."""
    if "," not in site.title:
        yield site.title
    texts = (site.retired, site.job.proxy, *site.note, *site.unconfirmed.values())
    yield from (text for text in texts if text and not URL.match(text))
    for storage in site.storage:
        places = itertools.chain(["{number}"], (f"{{number{index}}}" for index in itertools.count(2)))
        if storage.holds:
            yield f"for {', '.join(storage.holds)}; {{what}}"
        if storage.quota:
            yield DIGITS.sub(lambda _, places=places: next(places), storage.quota)


def help_texts() -> set[str]:
    """Returns each text that the help of any command looks up."""
    found = {*translated_help.LABELS, translated_help.USAGE, translated_help.COMMAND, translated_help.EXAMPLES_TITLE}

    def noted(text: str) -> str:
        found.add(text)
        return text

    before = app.help_formatter
    app.help_formatter = translated_help.TranslatedHelp(text=noted, app=app)
    for words in [(), *commands(app)]:
        app.help_print(list(words), console=Console(file=io.StringIO()))
    app.help_formatter = before
    return {text for text in found if re.search("[a-z]{2}", text)} | {translated_help.COMMAND}


def command(words: Iterable[str]) -> App:
    """Returns the command that these words name."""
    return functools.reduce(lambda outer, name: outer[name], words, app)


def commands(application: App, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the words of each command of the command line."""
    for name in application:
        if not name.startswith("-"):
            yield (*before, name)
            yield from commands(application[name], (*before, name))
