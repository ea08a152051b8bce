"""grappe verify: tests whether plans learn what one plain process learns; if not, finds the cause."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grappe import engines
from grappe.errors import UsageError
from grappe.launch.rank import rank_from_environment
from grappe.launch.start import start
from grappe.plan import AnyPlan, as_plan
from grappe.task import Task
from grappe.training.request import data_folder
from grappe.training.task_reference import TaskReference
from grappe.verbs.verify.runner import StartProcesses, TrialRunner
from grappe.verbs.verify.verdict import Verdicts, judge

STEPS = 8  # two epochs of a trial; longer trainings of correct code drift apart


def verify(
    task: Task | type[Task] | str,
    plans: Sequence[AnyPlan],
    *,
    fields: Mapping[str, object] | None = None,
    data: Path | str | None = None,
    steps: int = STEPS,
    run: StartProcesses = start,
    note: Callable[[str], None] = lambda line: None,
) -> Verdicts:
    """Compares each plan with one plain process: the same weights, the same global batches, `steps` steps.

    Args:
        run: the function that starts processes; for tests.
        note: callback, called with a short description of the next trial.

    Raises:
        GrappeError: a plan is not supported, or the task does not train.
    """
    if rank_from_environment() is not None:
        raise UsageError("grappe verify starts its own processes: run it without torchrun or srun")
    if steps < 1:
        raise UsageError(f"--steps={steps}: it must be at least 1")
    parsed = [as_plan(plan) for plan in plans]
    for plan in parsed:
        engines.check(plan)
    with tempfile.TemporaryDirectory(prefix="grappe-verify-") as folder:
        runner = TrialRunner(
            task=TaskReference.of(task, fields),
            data=data_folder(data),
            steps=steps,
            folder=Path(folder),
            run=run,
            note=note,
        )
        return Verdicts(judge(runner, plan) for plan in parsed)
