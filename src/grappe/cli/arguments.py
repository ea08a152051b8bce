"""Arguments that several commands share, the check of them, and the form of a dataclass of options as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, ArgumentCollection, Parameter

from grappe.fields import split, text_form

TaskName = Annotated[str, Parameter(help="A shipped task, path/to/file.py[:Name], or package.module:Name.")]
FieldText = Annotated[str, Parameter(help="The task's fields: epochs=3 lr=0.2 (see: grappe tasks NAME).")]
PlanText = Annotated[
    str,
    Parameter(
        show_default=False,
        help="Distribution over processes: replicate=2, or shard=4,zero=2,precision=bf16 (see: grappe engines)",
    ),
]
RunFolder = Annotated[Path, Parameter(help="A run's folder: runs/… (see: grappe runs)")]
RunTask = Annotated[
    str | None,
    Parameter(
        name="--task",
        help="The run's task, where it was not trained here: a name or file as for grappe train.",
    ),
]
CheckpointName = Annotated[
    str | None,
    Parameter(
        name="--checkpoint",
        help="A step, best or last: that and no other. Default: the newest that verifies.",
    ),
]
DataFolder = Annotated[Path | None, Parameter(help="Folder of datasets. Default: $GRAPPE_DATA, or ./data.")]
BaseFolder = Annotated[Path, Parameter(help="The folder of runs.")]
SWITCH = Parameter(negative="", show_default=False)


def _shown(default: Any) -> str | None:
    return str(default) if default and default is not True else None


OPTIONS = Parameter(name="*", show_default=_shown, negative_iterable=())
"""Of a dataclass: each field is an option, the docstring under the field is the option's help."""


def read_text_forms(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Reads the options whose type is written in a form of its own (90s, 0,3); cyclopts reads the others."""
    for argument in arguments:
        form = text_form(argument.field_info.annotation)
        if form is not None:
            argument.tokens = [
                token.evolve(implicit_value=form.read(token.value, token.keyword or argument.name))
                for token in argument.tokens
            ]


def preflight(
    plans: Sequence[str],
    task: str | None = None,
    fields: Sequence[str] = (),
    *,
    run: Path | None = None,
    once: bool = False,
) -> dict[str, str]:
    """Checks plans, fields and the task's name without torch; then starts the server that processes are forked from.

    Args:
        once: whether the command starts processes only once: a single process then needs no server.

    Returns:
        The texts of the task's fields, by name.

    Raises:
        UsageError: a plan's text, a field or the task's name is wrong.
    """
    from grappe import engines, tasks
    from grappe.launch import local
    from grappe.launch.rank import rank_from_environment
    from grappe.plan import Plan

    texts = split(fields)
    parsed = [Plan.parse(plan) for plan in plans]
    for plan in parsed:
        engines.check_name(plan.engine)
    if task is not None:
        tasks.check_name(task)
    done = run is not None and (run / "done").exists()
    single = once and all(plan.processes == 1 for plan in parsed)
    if not done and not single and rank_from_environment() is None:
        local.start_server(metrics=task is None or tasks.mentions(task, local.METRICS))
    return texts
