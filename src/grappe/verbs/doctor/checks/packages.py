"""Packages that are installed and cannot be imported: a torchvision made for another torch stops torchmetrics."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

from grappe.errors.causes import broken_package
from grappe.verbs.doctor.checks import Finding, Machine, error

IMPORTED = ("torchvision", "torchaudio", "torchmetrics")
"""What grappe, or what it imports, imports where it is installed."""


def check(machine: Machine) -> Iterator[Finding]:
    """Imports each package in turn."""
    named: set[str] = set()
    for name in IMPORTED:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as problem:
            what, _, do = (broken_package(problem) or f"{name} cannot be imported: {problem}").partition("; ")
            if what not in named:
                yield error(what, why="torchmetrics imports it, so nothing can be evaluated", do=do)
            named.add(what)
