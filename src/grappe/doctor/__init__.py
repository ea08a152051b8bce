"""The doctor's checks, found by their file's name: adding one is adding one file with `check(patient)`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from grappe.doctor.finding import Finding, Patient, warning


def names() -> list[str]:
    """The checks there are."""
    return sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py") if file.stem != "finding")


def examine(patient: Patient) -> Iterator[Finding]:
    """What every check finds; one that fails is a finding, and hides no other."""
    for name in names():
        try:
            yield from importlib.import_module(f"grappe.doctor.{name}").check(patient)
        except Exception as mistake:
            yield warning(f"the check {name} failed: {type(mistake).__name__}: {mistake}")
