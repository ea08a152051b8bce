"""grappe trains a PyTorch model on whatever machines you were given, with the same numbers under any plan."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from grappe.errors import GrappeError
from grappe.plan import Plan
from grappe.task import Download, Task
from grappe.words import VERSION

if TYPE_CHECKING:
    from grappe.checkpoint.foreign_training import pretrained
    from grappe.contrib.lightning.lightning_module import from_lightning
    from grappe.data.arrays import Arrays, normalise
    from grappe.data.datasets import split
    from grappe.data.draw import draw, mixup_pairs
    from grappe.data.rand_like import rand_like, randn_like
    from grappe.data.sampling import Sampling
    from grappe.parallel.tensor import SplitOutputs, split_convolutions
    from grappe.training.options import Options
    from grappe.training.own_loop import Loop, parallelize
    from grappe.training.run import Run
    from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher

__version__ = VERSION
__all__ = [
    "Arrays",
    "Download",
    "GrappeError",
    "Loop",
    "Options",
    "Outcome",
    "Plan",
    "Record",
    "Run",
    "RunInfo",
    "Sampling",
    "SplitOutputs",
    "Task",
    "Watcher",
    "draw",
    "evaluate",
    "foresee",
    "from_lightning",
    "load",
    "load_models",
    "measure",
    "mixup_pairs",
    "normalise",
    "parallelize",
    "predict",
    "pretrained",
    "rand_like",
    "randn_like",
    "split",
    "split_convolutions",
    "train",
    "tune",
    "verify",
]

# What needs torch is imported when it is first used, so that `grappe --help` is quick.
_LAZY = {
    name: f"grappe.{module}"
    for module, names in {
        "data.arrays": "Arrays normalise",
        "data.draw": "draw mixup_pairs",
        "data.rand_like": "rand_like randn_like",
        "checkpoint.foreign_training": "pretrained",
        "data.sampling": "Sampling",
        "data.datasets": "split",
        "contrib.lightning.lightning_module": "from_lightning",
        "parallel.tensor": "SplitOutputs split_convolutions",
        "training.options": "Options",
        "training.run": "Run",
        "training.own_loop": "Loop parallelize",
        "training.watchers.base": "Outcome Record RunInfo Watcher",
        "verbs.train": "train",
        "verbs.evaluate": "evaluate",
        "verbs.foresee.foresee": "foresee",
        "verbs.measure.measure": "measure",
        "verbs.predict.predict": "predict",
        "verbs.load": "load load_models",
        "contrib.tune.tune": "tune",
        "verbs.verify.verify": "verify",
    }.items()
    for name in names.split()
}


def __dir__() -> list[str]:
    """Lists the public names, for completion in a notebook; those of `_LAZY` are not in globals() yet."""
    return sorted([*__all__, "__version__", "data", "optimizers", "slurm"])


def __getattr__(name: str) -> Any:
    if name in ("data", "optimizers", "slurm"):
        return importlib.import_module(f"grappe.{name}")
    if name in _LAZY:
        attribute = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = attribute  # a task asks for grappe.draw at each step
        return attribute
    raise AttributeError(f"module 'grappe' has no attribute '{name}'")
