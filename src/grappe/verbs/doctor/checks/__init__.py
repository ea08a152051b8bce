"""The doctor's checks, found by their file's name: adding one is adding one file with `check(machine)`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from grappe.verbs.doctor.finding import Finding, Machine, warning


def names() -> list[str]:
    """The checks there are."""
    return sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py"))


def examine(machine: Machine) -> Iterator[Finding]:
    """Runs every check; one that fails is a finding, and hides no other."""
    for name in names():
        try:
            yield from importlib.import_module(f"{__name__}.{name}").check(machine)
        except Exception as mistake:
            yield warning(f"the check {name} failed: {type(mistake).__name__}: {mistake}")
