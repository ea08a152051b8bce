"""Runs Slurm's commands: parses their output; raises their complete errors, with the remedy."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from grappe.errors import GrappeError, UsageError, nearest
from grappe.fields import seconds
from grappe.launch import command
from grappe.sites.schema import PARTITION, Node, Queue, Site
from grappe.words import first_line

GONE = ("Invalid job id",)  # what squeue says of jobs that ended a while ago
SILENT = ("Socket timed out", "Unable to contact slurm controller")
UNCONFIGURED = "Could not establish a configuration source"  # Slurm's programs on a machine of no cluster
PING_SECONDS = 4.0
OF_THE_CONTROLLER = ("sbatch", "squeue", "sinfo", "scancel")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

# What sbatch says, and what to change.
REMEDIES = {
    "accounting/qos policy": "you have as many jobs as you may, or this one is too large or too long for your account "
    "or queue: wait, or ask for less with --time, --nodes or --mem",
    "job array specification": "the ids of an array are below MaxArraySize (scontrol show config): give smaller ones",
    "account": "give another --account: `sacctmgr show assoc user=$USER format=account` lists yours",
    "time limit": "ask for less with --time: the job saves before its end and is continued by itself",
    "node configuration is not available": "no node has so many GPUs or cores, or so much memory: "
    "use more --nodes, or a smaller plan",
    "more processors requested": "use fewer processes, or threads= and workers= in the plan",
    "qos": "give another --queue, or none: `sacctmgr show assoc user=$USER format=qos` lists yours",
    "partition": "give another --queue: `sinfo -s` lists them",
    "node count": "use fewer --nodes, or a smaller plan",
    "memory": "the node has less memory than its site's file states: copy that file to your own sites and correct it",
    "gres": "the GPUs are called otherwise here: `sinfo -o '%G'` names them",
    "feature": "the nodes are described otherwise here: `sinfo -o '%f'` lists their features",
    "maximum": "you have as many jobs as the site lets you: wait, or cancel some",
    "contact slurm controller": "Slurm's controller does not answer: try again in a minute",
}


class SlurmError(GrappeError):
    """One of Slurm's commands failed; the message is the command's own, complete."""


class ControllerDown(SlurmError):
    """Slurm's controller does not answer."""


class NoAnswer(SlurmError):
    """A command got no answer in time: it may have been carried out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A job in the queue."""

    job: str
    name: str
    state: str
    reason: str
    start: str
    """Time of the job's real or expected start; "N/A" if unknown."""
    left: str
    """The job's remaining time."""
    nodes: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """The end of a job."""

    state: str
    code: int
    signal: int = 0


def check_controller() -> None:
    """Asks Slurm's controller for a sign of life: other commands wait a minute or more for one that is down.

    Nothing is asked where there is sbatch and no scontrol, as in some containers.

    Raises:
        UsageError: this machine belongs to no cluster.
        ControllerDown: the controller does not answer.
    """
    if shutil.which("sbatch") and not shutil.which("scontrol"):
        return
    try:
        answer = run("scontrol", "ping", seconds=PING_SECONDS)
    except SlurmError as error:
        answer = str(error)
    if UNCONFIGURED in answer:
        raise no_slurm("no Slurm controller is reachable from this machine")
    if "UP" not in answer.split():  # of one controller at least
        raise ControllerDown(
            f"Slurm's controller gives no answer ({first_line(answer) or 'scontrol printed nothing'}): try again in a "
            "minute; tell the site if it stays so"
        )


def run(*words: str, both: bool = False, seconds: float = command.ANSWER_SECONDS) -> str:
    """Runs one of Slurm's commands; returns its standard output, with `both` its standard error too.

    Raises:
        UsageError: this machine belongs to no cluster.
        SlurmError: the command failed.
        NoAnswer: it gave no answer in `seconds`, or the controller gave it none.
        ControllerDown: the controller does not answer, which is known in PING_SECONDS.
    """
    if words[0] in OF_THE_CONTROLLER and shutil.which(words[0]):
        check_controller()
    try:
        return command.run(*words, both=both, seconds=seconds)
    except command.Missing as error:
        raise no_slurm(str(error)) from None
    except command.Failed as error:
        silent = error.code is None or any(words in str(error) for words in SILENT)
        raise (NoAnswer if silent else SlurmError)(str(error)) from None


def no_slurm(why: str) -> UsageError:
    """Makes the error of a machine that belongs to no cluster."""
    return UsageError(
        f"no Slurm here: {why}. To see a job's script, give --site NAME (grappe sites lists them); to submit it, log "
        "in to the cluster; grappe train does the same here"
    )


def submit(script: Path, *, test_only: bool = False) -> str:
    """Submits a script; returns the job's id, with `test_only` sbatch's estimate instead.

    Raises:
        SlurmError: sbatch rejects the script; its complete message, and the remedy.
        NoAnswer: the job may be in the queue all the same.
    """
    options = ("--test-only",) if test_only else ("--parsable",)
    try:
        answer = run("sbatch", *options, str(script), both=test_only)
    except ControllerDown:
        raise
    except NoAnswer as error:
        raise NoAnswer(
            f"{error}\n  the job may be in the queue all the same: grappe queue, before you submit it again"
        ) from None
    except SlurmError as error:
        raise SlurmError(f"{error}{remedy(str(error))}") from None
    return answer.strip() if test_only else answer.strip().partition(";")[0]


def remedy(refusal: str) -> str:
    """Returns the remedy for a rejection, on a new line; "" if it is unknown."""
    text = refusal.lower()
    return next((f"\n  {advice}" for words, advice in REMEDIES.items() if words in text), "")


SQUEUE_FORMAT = "%i|%j|%T|%r|%S|%L|%D"


def queue(jobs: Iterable[str] | None = None, *, expand: bool = False) -> list[Entry]:
    """Lists the user's jobs in the queue, or those of `jobs`, with `expand` each task of an array; one query."""
    which = ("--me",) if jobs is None else (f"--jobs={','.join(jobs)}",)
    which += ("--array",) if expand else ()
    try:
        text = run("squeue", "--noheader", *which, "--format", SQUEUE_FORMAT)
    except SlurmError as error:
        if any(words in str(error) for words in GONE):
            return []
        raise
    return entries(text)


def queue_now(jobs: Iterable[str] | None = None) -> list[Entry] | None:
    """Lists jobs as `queue` does; None if Slurm gives no answer now, which tells nothing about the jobs."""
    try:
        return queue(jobs)
    except (ControllerDown, NoAnswer):
        return None


def entries(text: str) -> list[Entry]:
    """Parses squeue's output in SQUEUE_FORMAT; rejoins a name that contains `|`."""
    jobs = []
    for line in text.splitlines():
        job, *name, state, reason, start, left, nodes = line.split("|")
        when = {"start": start, "left": left}
        jobs.append(Entry(job=job, name="|".join(name), state=state, reason=reason, nodes=nodes, **when))
    return jobs


def ended(job: str) -> End | None:
    """Returns a job's end, from Slurm's accounting or its controller; None if neither knows the job."""
    with contextlib.suppress(GrappeError):  # a site without accounting
        text = run("sacct", "--noheader", "--parsable2", "--jobs", job, "--format", "JobID,State,ExitCode")
        for line in text.splitlines():
            number, state, code = line.split("|")
            if number == job and state.split()[0] in ENDED:
                return _end(state.split()[0], code)
    with contextlib.suppress(GrappeError):  # a job that is forgotten
        words = dict(word.split("=", 1) for word in run("scontrol", "show", "job", job).split() if "=" in word)
        if (state := words.get("JobState", "")) in ENDED:
            return _end(state, words.get("ExitCode", "0:0"))
    return None


def _end(state: str, code: str) -> End:
    number, _, signal = code.partition(":")
    return End(state=state, code=int(number), signal=int(signal or 0))


def cancel(jobs: Sequence[str]) -> None:
    """Cancels jobs; a job that has ended already is no error."""
    if jobs:
        run("scancel", "--quiet", *jobs)


def sinfo(layout: str) -> str:
    """Runs sinfo; returns its output in this format."""
    return run("sinfo", "--noheader", "--format", layout)


def free_gpus(partition: str | None) -> int:
    """Returns the most GPUs that a node has free now, of a partition or of any; 0 if Slurm gives no answer."""
    which = ("--partition", partition) if partition else ()
    try:
        text = run("sinfo", "--noheader", "--Node", "--Format", "StateLong:24,Gres:128,GresUsed:128", *which)
    except GrappeError:
        return 0
    nodes = [words for line in text.splitlines() if len(words := line.split()) == 3]
    return max(
        (_gpus(gres)[0] - _gpus(used)[0] for state, gres, used in nodes if state in ("idle", "mixed")), default=0
    )


SINFO_FORMAT = "%P|%c|%m|%G|%l|%D|%s"
MODEL = re.compile(r"[\w.-]*", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionRow:
    """Nodes of one kind in one partition."""

    partition: str
    default: bool
    cores: int
    megabytes: int
    nodes: int
    gpus: int
    model: str
    hours: float | None
    most_nodes: int | None
    """Largest number of nodes of a job; None if there is no limit."""


def rows(text: str) -> list[PartitionRow]:
    """Parses the output of `sinfo -h -o SINFO_FORMAT`, one row per line; skips lines of another form."""
    partitions = []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != len(SINFO_FORMAT.split("|")):
            continue
        name, cores, megabytes, gres, limit, nodes, job_size = parts
        numbers = [re.match(r"\d{1,9}", text, re.ASCII) for text in (cores, megabytes, nodes)]
        partition, (gpus, model) = name.rstrip("*"), _gpus(gres)
        if not all(numbers) or not PARTITION.fullmatch(partition) or not MODEL.fullmatch(model):
            continue
        each, memory, count = (int(match[0]) for match in numbers if match)
        hours = None
        with contextlib.suppress(UsageError):  # no limit
            hours = seconds(limit, "sinfo") / 3600 if ":" in limit else None
        most = re.search(r"(\d{1,9})$", job_size, re.ASCII)
        partitions.append(
            PartitionRow(
                partition=partition,
                default=name.endswith("*"),
                cores=each,
                megabytes=memory,
                nodes=count,
                gpus=gpus,
                model=model,
                hours=hours,
                most_nodes=int(most[1]) if most else None,
            )
        )
    return partitions


def probed(site: Site, text: str, partition: str | None, *, wants_gpus: bool) -> Site:
    """Completes `site` with a partition's node and limits: the named, the default, or the first fitting partition.

    Raises:
        UsageError: there is no such partition, or no partition with GPUs.
    """
    partition_rows = rows(text)
    if not partition_rows:
        raise UsageError("sinfo lists no partition here: is Slurm running? Or give --site NAME (grappe sites)")
    names = {row.partition for row in partition_rows}
    if partition is not None and partition not in names:
        raise UsageError(f"there is no partition '{partition}' here: {nearest(partition, names)}")
    candidates = [row for row in partition_rows if partition in (None, row.partition)]
    able = [row for row in candidates if row.gpus] if wants_gpus else candidates
    if not able:
        where = f"partition {partition}" if partition else "this cluster"
        raise UsageError(f"no node of {where} has a GPU (sinfo): add device=cpu to the plan, or give another --queue")
    # The default partition first; of several kinds of node the one with the most GPUs.
    row = max(able, key=lambda row: (row.default, row.gpus * row.nodes, row.cores))
    node = Node(
        gpus=row.gpus,
        gpu=row.model or "GPU",
        cores=row.cores,
        memory_gb=max(1, row.megabytes // 1024) if row.megabytes > 1 else None,
        count=row.nodes,
    )
    queue = Queue(name=row.partition, options=(f"--partition={row.partition}",), max_nodes=row.most_nodes)
    gpus = f"--gres=gpu:{row.model}:{{gpus}}" if row.model else site.ask.gpus
    ask = dataclasses.replace(site.ask, gpus=gpus, max_hours=row.hours)
    return dataclasses.replace(site, node=node, ask=ask, queue=(queue,))


def _gpus(gres: str) -> tuple[int, str]:
    """Parses `gpu:a100:4(S:0-1),tmp:1` to 4 and "a100"."""
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = part.split(":")
        if kind == "gpu" and rest and re.fullmatch(r"\d{1,4}", rest[-1], re.ASCII):
            return int(rest[-1]), rest[0] if len(rest) > 1 else ""
    return 0, ""
