"""Arguments that several commands share, and the command line's form of a dataclass of options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, ArgumentCollection, Parameter

from grappe.fields import text_form

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
