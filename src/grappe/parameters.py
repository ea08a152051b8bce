"""Parameters: what several commands of the command line take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from grappe.errors import UsageError

TaskName = Annotated[str, Parameter(help="A shipped task, path/to/file.py[:Name], or package.module:Name.")]
FieldText = Annotated[str, Parameter(help="The task's fields: epochs=3 lr=0.2 (see: grappe tasks NAME).")]
PlanText = Annotated[
    str,
    Parameter(
        show_default=False,
        help="How a step is spread: replicate=2, or shard=4,zero=2,precision=bf16 (see: grappe engines)",
    ),
]
RunFolder = Annotated[Path, Parameter(help="A run's folder: runs/… (see: grappe runs)")]
DataFolder = Annotated[Path | None, Parameter(help="Where datasets are. Default: $GRAPPE_DATA, or ./data.")]
SWITCH = Parameter(negative="", show_default=False)


def whole_numbers(option: str, text: str, least: int = 1) -> list[int]:
    """The numbers of "32,64,128".

    Raises:
        UsageError: one of them is none, or below `least`.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if not part.isdecimal() or int(part) < least:
            raise UsageError(f"{option}={text}: give whole numbers from {least}, with commas between")
        found.append(int(part))
    return found
