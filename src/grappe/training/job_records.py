"""Records of a run's Slurm jobs: the submissions in its folder, and the notes against nodes next to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from grappe.errors import RunError
from grappe.errors.foreign_text import objects, printable
from grappe.launch import files
from grappe.launch.files import IN_PART, IN_RUN

JOBS = "jobs.jsonl"
FAILED_NODES = ".failed-nodes"
"""The file of notes against nodes, in a folder of runs. job.sh writes it."""
NOTE = re.compile(r"(\d{9,12}) ([A-Za-z0-9._-]{1,64}) (\d+\.\d+) ([^ :]+): (.*)", re.ASCII)


def submitted(run: Path) -> list[dict[str, Any]]:
    """Reads the submissions of a run or of an array's folder, oldest first; skips a damaged line."""
    try:
        lines = files.read_bytes(run / "logs" / JOBS, IN_PART).splitlines()
    except (OSError, RunError):
        return []
    return [record for record in objects(lines) if re.fullmatch(r"\d+(_\d+)?", str(record.get("job", "")))]


class FailureNote(NamedTuple):
    """A note against a node: one piece of evidence, of one start of a job."""

    at: float
    """Seconds since 1970."""
    node: str
    start: str
    """The job's id and the number of its restarts."""
    run: str
    """The run's name."""
    evidence: str


def failure_notes(base: Path) -> list[FailureNote]:
    """Reads the notes against nodes, next to the runs in `base`, oldest first; skips a damaged line."""
    try:
        lines = files.read_text(base / FAILED_NODES, IN_RUN).splitlines()
    except (OSError, RunError):
        return []
    notes = (NOTE.fullmatch(line) for line in lines)
    return [FailureNote(float(note[1]), note[2], note[3], note[4], printable(note[5], 500)) for note in notes if note]


def newest_job(run: Path) -> str:
    """Returns the id of a run's newest job.

    Raises:
        RunError: the run was never submitted.
    """
    jobs = submitted(run)
    if not jobs:
        raise RunError(f"{run} was never submitted: grappe submit -- train … --run {run}")
    return str(jobs[-1]["job"])
