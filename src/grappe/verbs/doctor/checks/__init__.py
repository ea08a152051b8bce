"""The doctor's checks, found by file name: to add a check, add one file with `check(machine)`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from grappe.verbs.doctor.finding import Finding, Machine, warning


def names() -> list[str]:
    """Lists the checks."""
    return sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py"))


def examine(machine: Machine) -> Iterator[Finding]:
    """Runs every check; an exception in a check becomes a finding, and the other checks still run."""
    for name in names():
        try:
            yield from importlib.import_module(f"{__name__}.{name}").check(machine)
        except Exception as mistake:
            yield warning(f"the check {name} failed: {type(mistake).__name__}: {mistake}")
