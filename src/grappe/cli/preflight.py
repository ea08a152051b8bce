"""Checks a command's arguments before torch is loaded, then lets the process server load torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grappe import engines, tasks
from grappe.launch import local
from grappe.launch.rank import rank_from_environment
from grappe.plan import Plan


def preflight(
    plans: Sequence[str], task: str | None = None, run: Path | None = None, *, once: bool = False
) -> None:
    """Checks plans and the task's name without torch; then starts the server that processes are forked from.

    Args:
        once: whether the command starts processes only once: a single process then needs no server.

    Raises:
        UsageError: a plan's text or the task's name is wrong.
    """
    parsed = [Plan.parse(plan) for plan in plans]
    for plan in parsed:
        engines.check_name(plan.engine)
    if task is not None:
        tasks.check_name(task)
    done = run is not None and (run / "done").exists()
    single = once and all(plan.processes == 1 for plan in parsed)
    if not done and not single and rank_from_environment() is None:
        local.start_server(metrics=task is None or tasks.mentions(task, local.METRICS))
