"""grappe trains a PyTorch model on whatever machines you were given, with the same numbers under any plan."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from grappe.errors import GrappeError
from grappe.plan import Plan
from grappe.task import Task

if TYPE_CHECKING:
    from grappe.carried import from_lightning
    from grappe.data.arrays import Arrays, normalise
    from grappe.data.draw import draw, partners
    from grappe.own_loop import Loop, parallelize

__version__ = "0.1.0"
__all__ = [
    "Arrays",
    "GrappeError",
    "Loop",
    "Plan",
    "Task",
    "draw",
    "evaluate",
    "from_lightning",
    "load",
    "normalise",
    "parallelize",
    "partners",
    "predict",
    "train",
    "verify",
]

# What needs torch is imported when it is first used, so that `grappe --help` is quick.
_LAZY = {
    "Arrays": "grappe.data.arrays",
    "normalise": "grappe.data.arrays",
    "draw": "grappe.data.draw",
    "partners": "grappe.data.draw",
    "from_lightning": "grappe.carried",
    "Loop": "grappe.own_loop",
    "parallelize": "grappe.own_loop",
    "train": "grappe.verbs.train",
    "evaluate": "grappe.verbs.evaluate",
    "predict": "grappe.verbs.predict",
    "load": "grappe.verbs.load",
    "verify": "grappe.verbs.verify",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'grappe' has no attribute '{name}'")
