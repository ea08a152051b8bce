"""grappe follow and grappe curves: shows a run's progress as it is written; writes the curves of runs as CSV."""

from __future__ import annotations

import contextlib
import csv
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rich.live import Live
from rich.table import Table

from grappe.errors import RunError
from grappe.errors.foreign_text import entries, number, objects, spreadsheet_cell
from grappe.launch import files
from grappe.launch.safe_console import SafeConsole, fact_table
from grappe.profiling.phases import PHASES
from grappe.training.run import ENDED_UNEXPECTEDLY, METRICS, SAVED, USAGE, Run
from grappe.verbs.runs import shown_scores
from grappe.words import format_number

POLL_SECONDS = 0.5
SILENT_SECONDS = 120.0
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 60
MOST_COLUMNS = 10_000
FIRST_COLUMNS = ("run", "kind", "step", "epoch", "samples", "loss")
ENDED = (*SAVED, "failed", ENDED_UNEXPECTEDLY)


class Tail:
    """Reader of new lines in a file of JSON lines; starts again from the beginning when the file is truncated."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = self._identity = 0
        self._rest = b""

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the records since the last call; leaves an incomplete line for the next call."""
        try:
            status = self._file.lstat()
        except OSError:
            return
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            return  # a link is refused by name, below
        if status.st_ino != self._identity or status.st_size < self._offset:
            self._identity, self._offset, self._rest = status.st_ino, 0, b""
        with files.reader(self._file) as stream:
            stream.seek(self._offset)
            content = self._rest + stream.read()
            self._offset = stream.tell()
        *lines, self._rest = content.split(b"\n")
        yield from objects(lines)


class RunView:
    """Collects a run's records so far."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._curves, self._usage = Tail(run.folder / METRICS), Tail(run.folder / USAGE)
        self._losses: list[float] = []
        self._step: dict[str, Any] = {}
        self._used: dict[str, Any] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.last_change = time.monotonic()

    def update(self) -> list[dict[str, Any]]:
        """Reads new records; returns the new evaluations."""
        fresh = []
        for record in self._curves.new():
            self.last_change = time.monotonic()
            if record.get("kind") == "step":
                self._step = record
                loss = record.get("loss")
                if isinstance(loss, int | float):
                    self._losses.append(loss if isinstance(loss, float) else number(loss))
            elif record.get("kind") == "evaluation":
                fresh.append(record)
        for record in self._usage.new():
            self._used = record
        self.evaluations += fresh
        return fresh

    def status(self) -> str:
        """Returns the run's status in one or two words; "" if it cannot be read now."""
        try:
            return self.run.read_status(self.run.read_description())
        except RunError:
            return ""

    def table(self) -> Table:
        """Draws the run: a table of figures, and the last second's time by phase."""
        step, used = self._step, self._used
        epoch = number(step.get("epoch")) + 1
        rows = [
            ("run", str(self.run.folder)),
            ("status", self.status()),
            ("step", f"{step.get('step', 0)}, epoch {epoch:.0f}, lr {number(step.get('lr')):.3g}"),
        ]
        if self._losses:
            rows.append(("loss", f"{format_number(self._losses[-1])}  {spark(self._losses)}"))
        for record in self.evaluations[-1:]:
            rows.append(("validation", scores(record)))
        if steps := number(used.get("steps")):
            rows.append(("speed", f"{steps / max(1e-9, number(used.get('seconds'))):,.1f} steps/s"))
        if used:
            rows.append(("memory", f"{_sum(used.get('memory')) / 1e6:,.0f} MB at most"))
        if watts := _sum(used.get("watts")):
            rows.append(("power", f"{watts:,.0f} W"))
        phases = entries(used.get("phases"))
        seconds = {name: number(phases.get(name)) for name in PHASES}
        total = sum(map(number, phases.values()))
        parts = [f"{name} {spent / total:.0%}" for name, spent in seconds.items() if total and spent / total > 0.005]
        if parts:
            rows.append(("time", ", ".join(parts)))
        return fact_table(rows)


def _sum(values: object) -> float:
    return sum(map(number, entries(values).values()))


def spark(values: list[float], width: int = WIDTH) -> str:
    """Draws a curve as a line of block characters, one for the mean of each piece."""
    finite = [value for value in values if value - value == 0]
    if not finite:
        return ""
    size = -(-len(finite) // width)
    means = [sum(piece) / len(piece) for piece in (finite[at : at + size] for at in range(0, len(finite), size))]
    low, high = min(means), max(means)
    return "".join(BLOCKS[round((mean - low) / (high - low or 1) * (len(BLOCKS) - 1))] for mean in means)


def scores(record: dict[str, Any]) -> str:
    """Formats an evaluation as one line."""
    return f"step {record.get('step')}  {shown_scores(record)}"


def follow(place: Path | str, stream: IO[str], *, sleep: Callable[[float], None] = time.sleep) -> str:
    """Shows a run until it ends, or writes nothing for two minutes; returns the run's status at that time.

    Raises:
        RunError: there is no such run, or its run.json is damaged.
    """
    Run(place).read_description()
    view = RunView(Run(place))
    console = SafeConsole(stream)
    live = Live(view.table(), console=console, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while True:
            # Before reading: what the run wrote at its end is read below.
            status, over = view.status(), ""
            if status.startswith(ENDED):
                over = status
            elif time.monotonic() - view.last_change > SILENT_SECONDS:
                over = f"{status or 'unknown'}, silent for {SILENT_SECONDS:.0f} s: it may have ended unexpectedly"
            evaluations = view.update()
            if live is not None:
                live.update(view.table(), refresh=True)
            else:
                for line in [*map(scores, evaluations), *([over] if over else [])]:
                    console.print(line, soft_wrap=True)
            if over:
                return over
            sleep(POLL_SECONDS)


def write_csv(places: Sequence[Path | str], stream: IO[str]) -> int:
    """Writes the curves of runs to `stream`; returns the number of lines, without the heading.

    Raises:
        RunError: one of the folders is no run.
    """
    runs = [Run(place) for place in places]
    names = dict.fromkeys(FIRST_COLUMNS)
    for run in runs:
        for record in run.records():
            names |= dict.fromkeys(record)
            if len(names) > MOST_COLUMNS:
                raise RunError(f"{run.folder}: its curves have more than {MOST_COLUMNS:,} names, and are damaged")
    writer = csv.DictWriter(stream, names, extrasaction="ignore", lineterminator="\n")
    writer.writerow({name: spreadsheet_cell(name) for name in names})
    lines = 0
    for run in runs:
        for record in run.records():
            cells = {"run": run.folder.name, **record}
            writer.writerow({name: spreadsheet_cell(value) for name, value in cells.items()})
            lines += 1
    return lines
