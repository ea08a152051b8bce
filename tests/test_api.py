"""Public names: the reference lists each of them once, and nothing that cannot be imported."""

from __future__ import annotations

import re

from docs import api

import grappe
import grappe.data
import grappe.data.augment
import grappe.optimizers
import grappe.slurm

MODULES = (grappe, grappe.data, grappe.data.augment, grappe.optimizers, grappe.slurm)


def test_the_reference_lists_what_each_module_says_is_public() -> None:
    listed = re.findall(r"^### `(grappe[\w.]*)`", api.page(), re.MULTILINE)
    assert listed == [f"{module.__name__}.{name}" for module in MODULES for name in sorted(module.__all__)]


def test_every_public_name_is_a_class_or_a_function_with_a_docstring() -> None:
    names = [(module, name) for module in MODULES for name in module.__all__]
    faults = [
        f"{module.__name__}.{name}"
        for module, name in names
        if not callable(getattr(module, name)) or not getattr(module, name).__doc__
    ]
    assert not faults, "\n".join(faults)
