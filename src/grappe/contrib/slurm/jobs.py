"""grappe queue, logs, wait, cancel: finds a run's jobs in Slurm, and their logs; records jobs in the run's folder."""

from __future__ import annotations

import codecs
import contextlib
import fnmatch
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from rich.table import Table

from grappe.contrib.slurm import slurm
from grappe.contrib.slurm.script import FUNCTIONS
from grappe.errors import EXIT_OK, ProcessDied, RunError
from grappe.launch import command, files
from grappe.launch.files import IN_PART, IN_RUN
from grappe.training.job_records import FAILED_NODES, JOBS, FailureNote, failure_notes, newest_job, submitted
from grappe.training.run import DONE
from grappe.words import plain_table

FILE_SECONDS = 1.0  # between reads of the run's folder
QUERY_SECONDS = 60.0  # between queries to Slurm, which sites ask to keep rare
GRACE_SECONDS = 120.0  # Slurm may forget a job before its database has it
ENDINGS = {
    "TIMEOUT": "reached its time limit without a save: ask for more --time, or --save-every fewer steps",
    "OUT_OF_MEMORY": "took more memory than it asked for: use a smaller batch_size, fewer workers, or more nodes",
    "CANCELLED": "was cancelled",
    "NODE_FAIL": "lost a node",
}


def record_job(run: Path, job: str, site: str, cost: str, tasks: Mapping[int, Path] = MappingProxyType({})) -> None:
    """Records in the run's folder that `job` was submitted for the run; of an array also in the run of each task."""
    for folder, name in ((run, job), *((task, f"{job}_{number}") for number, task in tasks.items())):
        line = {"job": name, "site": site, "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "cost": cost}
        with files.appender(folder / "logs" / JOBS, IN_PART) as stream:
            stream.write(json.dumps(line).encode() + b"\n")


def nodes_to_leave_out(base: Path) -> dict[str, list[FailureNote]]:
    """Returns the nodes that were noted twice within a week, or computed wrongly, with their notes: the last four."""
    if not (notes := failure_notes(base)):
        return {}
    nodes = command.run("bash", str(FUNCTIONS), "failed_nodes", str(base / FAILED_NODES)).strip().split(",")
    return {node: of_node for node in nodes if (of_node := [note for note in notes if note.node == node])}


def runs_of(base: Path) -> dict[str, Path]:
    """Maps job ids to the runs under `base`."""
    if not base.is_dir():
        return {}
    return {str(record["job"]): entry for entry in sorted(base.iterdir()) for record in submitted(entry)}


def queue(base: Path) -> Table | str:
    """Makes a table of the user's jobs in the queue, with their runs; one query to Slurm."""
    entries = slurm.queue()
    if not entries:
        return "no job of yours is in the queue"
    runs = runs_of(base)
    table = plain_table("job", "run", "state", "reason", "starts", "left", "nodes")
    table.columns[1].no_wrap = True
    for entry in entries:
        run = runs.get(entry.job.partition("_")[0])
        reason = entry.reason if entry.reason != "None" else ""
        start = entry.start.replace("T", " ") if entry.state == "PENDING" else ""
        table.add_row(entry.job, str(run or entry.name), entry.state, reason, start, entry.left, entry.nodes)
    return table


def cancel(runs: Iterable[Path], *, dry_run: bool = False) -> list[str]:
    """Cancels the jobs of runs that are still in the queue and returns their ids. Checkpoints are kept.

    With `dry_run` nothing is cancelled.

    Raises:
        RunError: a run was never submitted.
    """
    jobs = []
    for run in runs:
        newest_job(run)
        jobs += [str(record["job"]) for record in submitted(run)]
    if not dry_run:
        slurm.cancel(jobs)
    return jobs


def wait(run: Path, job: str = "", *, query_every: float = QUERY_SECONDS) -> int:
    """Waits for the end of a run's newest job, restarts included; returns the job's exit code, of an array the largest.

    Reads the run's folder each second, and queries Slurm each minute for jobs that could not write their exit code.

    Raises:
        ProcessDied: the job ended without an exit code, or Slurm killed it; the message gives the known reason.
    """
    job = job or newest_job(run)
    if tasks := tasks_of(run, job):
        codes = list[int]()
        with contextlib.ExitStack() as waits:  # for all of them, also after an error
            for task in tasks:
                waits.callback(lambda task=task: codes.append(wait(task, query_every=query_every)))
        return max(codes)
    exit_file = run / "logs" / f"job-{job}.end"
    queried = missed = 0.0
    while True:
        if (run / DONE).exists():
            return EXIT_OK
        if (code := written_code(exit_file)) is not None:
            return code
        now = time.monotonic()
        if not queried or now - queried >= query_every:
            queried = now
            if entries := slurm.queue_now([job]):
                missed = 0.0
            elif entries is not None:
                missed = missed or now
                if (end := slurm.ended(job)) is not None and not exit_file.exists():
                    if end.state in ("COMPLETED", "FAILED") and not end.signal:
                        return end.code
                    how = ENDINGS.get(end.state, f"ended as {end.state}")
                    raise ProcessDied(f"job {job} of {run} {how}: grappe logs {run}")
                if now - missed > GRACE_SECONDS:
                    raise ProcessDied(
                        f"job {job} of {run} is gone, and neither Slurm nor the run knows its end: grappe logs {run}"
                    )
        time.sleep(FILE_SECONDS)


def tasks_of(run: Path, job: str) -> list[Path]:
    """Finds the folders of the runs of an array's job; [] for any other job."""
    folders = sorted(run.iterdir()) if run.is_dir() else []
    return [
        folder for folder in folders if any(str(record["job"]).startswith(f"{job}_") for record in submitted(folder))
    ]


def written_code(file: Path) -> int | None:
    """The exit code that a job has left in `file`, logs/job-ID.end; None: none so far."""
    try:
        text = files.read_text(file, IN_PART).strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else None


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
    if not paths and (tasks := tasks_of(run, newest_job(run) if submitted(run) else "")):
        raise RunError(f"{run} is an array: name the run of a task, as {tasks[0]} (grappe runs --runs {run})")
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
