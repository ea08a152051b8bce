"""Words for users that all rooms share: sizes, durations, counts, lists, plans, the names of this machine, tables."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

VERSION = "0.1.0"


def format_bytes(size: float) -> str:
    """Formats a number of bytes: 247 kB, 101 MB, 1.3 GB."""
    if size >= 999.5e6:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if not 500 <= size < 999.5e3 else f"{size / 1e3:.0f} kB"


def format_part_of_bytes(part: float, total: float) -> tuple[str, str]:
    """Formats the bytes of a part and of its total, both in one unit: 0 kB and 321 kB, 152 MB and 1,304 MB."""
    if 0 < total < 999.5e3:
        return f"{part / 1e3:.0f} kB", f"{total / 1e3:.0f} kB"
    if part >= 999.5e6:
        return format_bytes(part), format_bytes(total)
    return f"{part / 1e6:.0f} MB", f"{total / 1e6:,.0f} MB"


def format_seconds(seconds: float) -> str:
    """Formats the seconds of a step: 0.24 ms, 12.3 ms, 1.25 s."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-4 else f"{1e3 * seconds:.2f} ms"


def format_number(value: float) -> str:
    """Formats a measured number to four significant digits: 0.9800, 12.35, 45,123, 3.200e-05."""
    return f"{value:,.0f}" if 999.95 <= abs(value) < 1e9 else f"{value:#.4g}"


def format_numbers(values: Sequence[Any]) -> str:
    """Formats a metric's numbers, rows of a matrix by semicolons: "3.000, 1.000; 0.0000, 5.000"."""
    nested = any(isinstance(value, list) for value in values)
    parts = [format_numbers(value) if isinstance(value, list) else format_number(value) for value in values]
    return ("; " if nested else ", ").join(parts)


def count_of(number: int, noun: str) -> str:
    """Formats a count with its noun: 1 step, 1,200 steps, 2 processes."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def sent_in_step(sent: Mapping[str, Mapping[str, int]]) -> str:
    """Writes what a process sends in a step: by purpose its "bytes" and, where they were counted, its "messages"."""
    return ", ".join(
        f"{purpose} {format_bytes(each['bytes'])}"
        + (f" ({count_of(each['messages'], 'message')})" if "messages" in each else "")
        for purpose, each in sorted(sent.items(), key=lambda item: -item[1]["bytes"])
    )


def and_more(items: Sequence[object], shown: int) -> str:
    """Lists at most `shown` items, and counts the others: a, b and 3 more."""
    rest = len(items) - shown
    return ", ".join(map(str, items[:shown])) + (f" and {rest:,} more" if rest > 0 else "")


def plan_name(plan: object) -> str:
    """Returns a plan's text; the default plan has none, and is called by its meaning."""
    return str(plan) or "one process"


def first_line(error: object) -> str:
    """Returns the first line of an error's message, or of a text."""
    return str(error).strip().partition("\n")[0]


def host_name() -> str:
    """Returns this machine's name for users: in a Slurm job the node's name, by which Slurm's commands know it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


NVIDIA, AMD_DRIVER = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")


def driver_version(text: str) -> str:
    """Reads the version in a driver's file."""
    match = re.search(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else "unknown"


@functools.cache
def processor_name() -> str:
    """Returns the processor's model; where the system does not say it (Arm), its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, os.uname().machine)


def plain_table(*columns: str) -> Table:
    """Makes a table without lines, whose first column keeps its lines; without a header if no column has a name."""
    from rich.table import Column, Table

    headers = [Column(name, overflow="fold", no_wrap=not index) for index, name in enumerate(columns)]
    return Table(*headers, box=None, show_header=any(columns), padding=(0, 2, 0, 0))


def filled_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Makes a table like `plain_table`, without the columns in which all cells are "" or "-"."""
    kept = [index for index in range(len(columns)) if any(row[index] not in ("", "-") for row in rows)]
    table = plain_table(*(columns[index] for index in kept))
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table
