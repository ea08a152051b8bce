"""Starts a function on a plan's processes: torchrun's or srun's, or local ones."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from grappe.launch import local, mps
from grappe.launch.exit import reported_once
from grappe.launch.folders import rendezvous_folder_of
from grappe.launch.rank import rank_from_environment
from grappe.plan import Plan


def start(function: str, request: Any, plan: Plan, *, run: Path | None = None, saves: bool = False) -> Any:
    """Runs `function` as function(request, process, rendezvous_folder) on the plan's processes.

    Args:
        function: "package.module:name", imported in each process.
        request: pickled by value.
        run: a folder that all nodes see, for their rendezvous: the run's; None: the one that the launcher gives.
        saves: whether a signal makes the function save and return.

    Returns:
        The result of process 0; under a launcher, of this process.

    Raises:
        GrappeError: the function failed. Under a launcher one process raises it, and the others SystemExit.
    """
    process = rank_from_environment()
    if process is None:
        with mps.shared_gpus(plan, None):
            return local.local(function, request, plan.processes, saves=saves)
    plan.check_fits(process.size)
    module, _, name = function.partition(":")
    try:
        with mps.shared_gpus(plan, process):
            return getattr(importlib.import_module(module), name)(
                request, process, rendezvous_folder_of(process, run)
            )
    except Exception as error:
        raise reported_once(error, process) from error
