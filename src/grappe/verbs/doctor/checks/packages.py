"""Packages that are installed and cannot be imported: a torchvision made for another torch stops torchmetrics."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

from grappe.errors.causes import broken_package
from grappe.verbs.doctor.checks import Finding, Machine, error
from grappe.verbs.submit.packages import modules_of_file

IMPORTED = ("torchvision", "torchaudio", "torchmetrics")
"""What grappe, or what it imports, imports where it is installed."""

USING_METRICS = {"grappe", "lightning", "pytorch_lightning"}
"""Modules that import torchmetrics."""


def check(machine: Machine) -> Iterator[Finding]:
    """Imports each package in turn; for a script of the user's own, those that it imports."""
    named: set[str] = set()
    used = {*IMPORTED}
    if machine.script is not None:
        used = modules_of_file(machine.script)
        used |= {"torchmetrics"} if used & USING_METRICS else set()
    for name in IMPORTED:
        if name not in used or importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as problem:
            what, _, do = (broken_package(problem) or f"{name} cannot be imported: {problem}").partition("; ")
            if what not in named:
                why = "torchmetrics imports it, so nothing can be evaluated"
                yield error(what, why=why if machine.script is None else "the script imports it", do=do)
            named.add(what)
