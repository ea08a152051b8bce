"""Durations as people write them: 90, 90s, 30m, 2h, and 1-02:30:00 as Slurm does."""

from __future__ import annotations

import re

from grappe.errors import UsageError

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
PLAIN = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([smhd]?)", re.ASCII)
CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", re.ASCII)


def seconds(text: str, name: str) -> float:
    """The seconds that `text` says; `name` is what the user calls the option.

    Raises:
        UsageError: it says none.
    """
    if plain := PLAIN.fullmatch(text.strip()):
        found = float(plain[1]) * UNITS[plain[2]]
    elif clock := CLOCK.fullmatch(text.strip()):
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        found = days * 86400.0 + hours * 3600.0 + minutes * 60.0 + rest
    else:
        found = 0.0
    if found <= 0:
        raise UsageError(f"{name}={text}: give seconds, or a time like 90s, 30m, 2h or 02:30:00")
    return found
