"""A study whose trials are Slurm jobs, as of `grappe tune --site generic`, but with a query to Slurm each second."""

import json
import os
import sys
from pathlib import Path

from grappe.contrib.slurm import jobs
from grappe.contrib.tune.coordinator import Coordinator
from grappe.contrib.tune.space import SearchOptions
from grappe.contrib.tune.tune import search
from grappe.fields import split
from grappe.launch.start import interrupted
from grappe.plan import as_plan
from grappe.sites.sbatch import JobOptions
from tests.commands import MARK

PLAN = "device=cpu,threads=1,workers=0"


def main(study: str, task: str, wanted: str, *words: str) -> int:
    """Searches; exit code 75 after a signal.

    Args:
        wanted: the search, as JSON.
        words: the fields, and options of sbatch.
    """
    jobs.QUERY_SECONDS = 1.0
    os.environ.pop(MARK, None)  # jobs inherit variables, and outlive the command that this one marks
    sbatch = tuple(word for word in words if word.startswith("--"))
    said = ""

    def watch(progress: Coordinator) -> None:
        nonlocal said
        if progress.waiting != said:
            said = progress.waiting
            print(f"waiting: {said}", file=sys.stderr, flush=True)

    options = json.loads(wanted)
    array = "array" if options.pop("array", False) else None
    found, complete = search(
        task,
        split(word for word in words if word not in sbatch),
        as_plan(PLAN),
        SearchOptions(**options),
        Path(study),
        jobs=JobOptions(site="generic", time="10m", doctor=False, sbatch=sbatch, array=array),
        watch=watch,
    )
    if found.best is not None:
        print(f"best: trial {found.best.number}")
    return 0 if complete else interrupted()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
