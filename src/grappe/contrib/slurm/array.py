"""Array: the tasks of a job array, a run each; reads their ids in Slurm's form."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from grappe.errors import UsageError

PLACE, TASK_ID = "{array}", "SLURM_ARRAY_TASK_ID"  # the id of the task: in a command's words, and its variable
MOST = 10_000  # tasks of an array: each has a folder before it begins
RANGE = r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?"
FORM = re.compile(rf"{RANGE}(,{RANGE})*(%0*[1-9]\d{{0,6}})?", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """The tasks of a job array. Each has a run in the array's folder: task-0001."""

    ids: tuple[int, ...]
    at_once: int | None = None
    """The largest number of tasks that run at a time; None: all."""
    words: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """The fields of each task of a study, whose runs are called trial-0001."""

    def __str__(self) -> str:
        in_a_row = itertools.groupby(enumerate(self.ids), lambda pair: pair[1] - pair[0])
        groups = [[number for _, number in group] for _, group in in_a_row]
        ranges = [f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups]
        return ",".join(ranges) + (f"%{self.at_once}" if self.at_once else "")

    @property
    def name(self) -> str:
        """The beginning of the names of the tasks' folders."""
        return "trial" if self.words else "task"

    def folders(self, base: Path) -> dict[int, Path]:
        """Returns the folder of each task's run, by its id."""
        return {number: base / f"{self.name}-{number:04d}" for number in self.ids}


def parse(text: str | None) -> Array | None:
    """Reads ids as sbatch has them: 1-20, 1,3,5, 1-20:2, and %4 at the end for at most 4 at a time; None: no array.

    Raises:
        UsageError: they have another form, or a range has no id.
    """
    if text is None:
        return None
    spans = [(int(first), int(last or first) + 1, int(step or 1)) for first, last, step in re.findall(RANGE, text)]
    wrong = not FORM.fullmatch(text) or any(first >= end or not step for first, end, step in spans)
    if wrong or sum(len(range(*span)) for span in spans) > MOST:
        raise UsageError(
            f"--array={text!r}: write ids as Slurm does: 1-20, or 1,3,5, or 1-20:2, and %4 at the end for at most 4 at "
            f"a time; {MOST:,} tasks at most"
        )
    most = text.partition("%")[2]
    spans = spans[:-1] if most else spans
    return Array(
        ids=tuple(sorted({number for span in spans for number in range(*span)})), at_once=int(most) if most else None
    )
