"""grappe verify: whether plans learn what one plain process learns, and if one does not, why."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from grappe import engines
from grappe.errors import UsageError
from grappe.parity.bench import Bench, Runner
from grappe.parity.judge import Finding, judge
from grappe.place import place_from_environment
from grappe.plan import Plan, as_plan
from grappe.task import Task
from grappe.verbs.session import TaskReference, start
from grappe.verbs.train import data_folder

STEPS = 8  # two epochs of a trial; longer trainings of correct code drift apart


def verify(
    task: Task | type[Task] | str,
    plans: Sequence[Plan | str],
    *,
    fields: Mapping[str, str] | None = None,
    data: Path | str | None = None,
    steps: int = STEPS,
    run: Runner = start,
    note: Callable[[str], None] | None = None,
) -> Iterator[Finding]:
    """Tries each plan beside one plain process: the same weights, the same global batches, `steps` steps.

    Args:
        run: what starts processes; for tests.
        note: told what is being tried, in a few words.

    Raises:
        GrappeError: a plan cannot be honoured, or the task does not train at all.
    """
    if place_from_environment() is not None:
        raise UsageError("grappe verify starts processes of its own: start it without torchrun or srun")
    if steps < 1:
        raise UsageError(f"--steps={steps}: it must be at least 1")
    asked = [as_plan(plan) for plan in plans]
    for plan in asked:
        engines.check(plan)
    with tempfile.TemporaryDirectory(prefix="grappe-verify-") as folder:
        bench = Bench(
            task=TaskReference.of(task, fields),
            data=data_folder(data),
            steps=steps,
            folder=Path(folder),
            run=run,
            note=note or _nothing,
        )
        for plan in asked:
            yield judge(bench, plan)


def _nothing(_: str) -> None:
    """Nobody wants to know."""


def progress(words: str) -> None:
    """One line on a terminal's standard error, over the one before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)
