"""grappe logs: reads the log of a run's job or of one of its processes, and follows new lines."""

from __future__ import annotations

import codecs
import fnmatch
import re
import time
from collections.abc import Iterator
from pathlib import Path

from grappe.errors import RunError
from grappe.launch import files
from grappe.launch.files import IN_PART, IN_RUN
from grappe.training.run import DONE
from grappe.verbs.submit.jobs import submitted

POLL_SECONDS = 0.5


def log_files(run: Path) -> list[Path]:
    """Finds a run's logs: its jobs' logs in order, then logs of processes that grappe started, by rank.

    Raises:
        RunError: the run has no log.
    """
    logs = run / "logs"
    try:
        there = sorted(files.names(logs, IN_RUN), key=lambda name: (len(name), name))
    except OSError:
        there = []
    paths = [
        logs / name
        for pattern in ("job-*.out", "rank-*.log")
        for name in fnmatch.filter(there, pattern)
        if files.kind(logs / name) in ("file", "link")  # a link is refused by name when it is read
    ]
    if not paths:
        waits = "; its job has not begun: grappe queue" if submitted(run) else ""
        raise RunError(f"{run} has no log{waits}")
    return paths


def lines(run: Path, rank: int | None = None, *, follow: bool = False) -> Iterator[str]:
    """Reads the lines of a run's newest log, or of process `rank`; with `follow`, until the newest job has ended.

    Raises:
        RunError: there is no such log.
    """
    logs = log_files(run)
    own = run / "logs" / f"rank-{rank}.log"
    jobs = [file for file in logs if file.name.startswith("job-")]
    if rank is None or own in logs:
        yield from _read(run, own if own in logs else (jobs or logs)[-1 if jobs else 0], follow)
        return
    # srun --label puts each process's number before its lines.
    label = re.compile(rf" *{rank}: ?")
    any_line = False
    for line in _read(run, jobs[-1], follow) if jobs else ():
        if match := label.match(line):
            any_line = True
            yield line[match.end() :]
    if not any_line:
        raise RunError(f"{run} has no line of process {rank}: has its plan so many processes (grappe runs {run})?")


def _read(run: Path, file: Path, follow: bool) -> Iterator[str]:
    """Yields complete lines as they are written."""
    jobs = submitted(run)
    end = run / "logs" / f"job-{jobs[-1]['job'] if jobs else 0}.end"
    rest = ""
    text = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with files.reader(file, IN_PART) as stream:
        while True:
            ended = not follow or end.exists() or (run / DONE).exists()
            *complete, rest = (rest + text.decode(stream.read())).splitlines(keepends=True) or [""]
            if rest.endswith("\n"):
                complete, rest = [*complete, rest], ""
            yield from complete
            if ended:
                if rest:
                    yield rest
                return
            time.sleep(POLL_SECONDS)
