"""Defines the options of a job; checks sbatch's own options, and merges them with grappe's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from grappe.errors import UsageError
from grappe.fields import Names, NumberRange, Numbers, TextForm, at_least, number_or_range, seconds, whole_numbers

TRAIN = "train"
SCRIPT = "script"
LAUNCH = "launch"
TUNE = "tune"
AUTO = "auto"  # the time limit, or the number of GPUs, that is foreseen

OPTION = re.compile(r"--([a-z][a-z-]*)(?:=([\w.,:;@%/+*|&?!()\[\]{}=~^-]+))?", re.ASCII)
VALUES = {
    "mem": re.compile(r"\d+[KMGT]?", re.ASCII),
    "mem-per-cpu": re.compile(r"\d+[KMGT]?", re.ASCII),
    "constraint": re.compile(r"[\w.,&|*()\[\]+-]+", re.ASCII),
    "qos": re.compile(r"\w[\w.+-]*", re.ASCII),
    "partition": re.compile(r"\w[\w.,+-]*", re.ASCII),
    "reservation": re.compile(r"\w[\w.,+-]*", re.ASCII),
    "dependency": re.compile(r"[a-z]+(:[\w+:-]+)?([,?][a-z]+(:[\w+:-]+)?)*", re.ASCII),
    "mail-user": re.compile(r"\w[\w.+-]*(@[\w.-]+)?", re.ASCII),
}
EXAMPLES = {
    "mem": "32G",
    "mem-per-cpu": "4G",
    "dependency": "afterok:12345",
    "mail-user": "me@example.org",
    "constraint": "'a100|h100'",
}

SAYS_SO = {
    "account": "--account",
    "array": "--array, or --chain",
    "cpus-per-gpu": "--cores",
    "cpus-per-task": "--cores",
    "gpus": "--gpus",
    "gpus-per-node": "--gpus and --nodes",
    "gpus-per-task": "--gpus and the plan",
    "job-name": "--name",
    "nodes": "--nodes",
    "ntasks": "the plan, or --processes",
    "ntasks-per-core": "the plan, or --processes",
    "ntasks-per-gpu": "the plan, or --processes",
    "ntasks-per-node": "the plan, or --processes",
    "time": "--time",
    **{name: f"--{name}" for name in VALUES},
}
"""Options of sbatch for which grappe has an option."""
OURS = frozenset(re.findall(r"\S+", """
    batch chdir error export export-file get-user-env gid help ignore-pbs input kill-on-invalid-dep
    no-requeue open-mode output parsable quiet requeue signal test-only uid usage verbose version wait wrap
"""))  # fmt: skip
"""Options of sbatch on which the job's script depends."""


FEWEST = (-1,)
"""The numbers of GPUs of --gpus auto, until they are foreseen."""


SLICE = re.compile(r"[A-Za-z]\w*_[\w.]+|\d+g\.\d+gb", re.ASCII)
"""The name of a slice of a GPU, or its profile alone."""


def gpu_counts(text: str, name: str) -> tuple[int | str, ...]:
    """Converts the text of --gpus: numbers, a NumberRange, FEWEST, or the name of a slice of a GPU."""
    if text == AUTO:
        return FEWEST
    if SLICE.fullmatch(text):
        return (text,)
    counts = number_or_range(text, name) if "-" in text else whole_numbers(text, name, least=0)
    return (counts,) if isinstance(counts, int) else counts


GpuCounts = Annotated[tuple[int | str, ...], TextForm(gpu_counts), Parameter(metavar="N or N-M")]
NodeCount = Annotated[Numbers, Parameter(accepts_keys=False, metavar="N or N-M")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a command's Slurm job.

    `grappe submit` has an option for each field, with the docstring under the field as its help.
    """

    site: str | None = None
    """Cluster (see: grappe sites). Default: this one."""
    account: str | None = None
    """Account to be billed."""
    time: str | None = None
    """Time limit: 90m, 3h, 1-00:00:00; auto: of a training, as measured or foreseen, with a margin. Default: 1 h."""
    nodes: NodeCount | None = None
    """Number of nodes; 1-4: as many as Slurm has at each start; plan and --gpus are those of the fewest. Default:
    as few as the plan needs."""
    spare: int = 0
    """Number of nodes more than are used: they idle, and cost, until they take the place of one that fails."""
    gpus: GpuCounts = ()
    """Total number of GPUs; 1,2,4: a job for each number; 2-8: as many as are free; 0: CPUs only; a slice's name: that
    part of a GPU; auto: the smallest slice, or the fewest GPUs of a node, that is enough for the training. Default: as
    the plan needs."""
    processes: int | None = None
    """Number of processes of your own script. Default: one for each GPU."""
    cores: int | None = None
    """Cores of each process. Default: its GPU's share; without GPUs, its threads and workers."""
    mem: str | None = None
    """Memory of each node: 32G. Default: in proportion to GPUs or cores."""
    mem_per_cpu: str | None = None
    """Memory of each core: 4G."""
    queue: str | None = None
    """Queue of the site: a partition or quality of service (see: grappe sites NAME)."""
    partition: str | None = None
    """Slurm partition that is not a queue of the site."""
    qos: str | None = None
    """Quality of service of Slurm that is not a queue of the site."""
    constraint: str | None = None
    """Features of the nodes beyond the site's."""
    reservation: str | None = None
    """Reservation of nodes."""
    dependency: str | None = None
    """Jobs to wait for: afterok:12345."""
    mail_user: str | None = None
    """Address for a mail when the job ends, fails or is requeued."""
    sbatch: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = ()
    """Any other option of sbatch: '--exclude=n1'. Repeatable."""
    name: str | None = None
    """The job's name. Default: the run's."""
    env: str = ""
    """Environment: here, virtualenv (made on each node), module, conda:NAME, a venv's folder, a .sif image; uv (of this
    folder's uv.lock) or pack:FOLDER: packed in one file, unpacked on each node. Default: the site's."""
    modules: Names = ()
    """Modules to load instead of the site's: python/3.12,gcc,cuda/12.6."""
    with_: tuple[str, ...] = ()
    """Package to install, NAME or NAME==VERSION, in addition to those of the imports and the engine. Repeatable."""
    requirements: Path | None = None
    """File of packages to install, in pip's form."""
    wheels: Path | None = None
    """Folder of wheels beyond the site's."""
    stage: Path | None = None
    """Tar archive of data, unpacked to local scratch on each node."""
    array: str | None = None
    """Ids of tasks, a run each: 1-20%4, 4 at a time; {array} in the command is the id, as in seed={array}."""
    chain: int = 0
    """Number of jobs in a row, for sites where jobs may not requeue."""
    restarts: int = 50
    """Maximal number of requeues of the job."""
    doctor: Annotated[bool, Parameter(negative="--no-doctor")] = True
    """Examine the nodes with grappe doctor first (the default)."""
    runs: Path = Path("runs")
    """Folder of runs."""

    def __post_init__(self) -> None:
        at_least(self, 0, "chain", "restarts", "spare")
        at_least(self, 1, "processes", "cores")
        if self.time and self.time != AUTO:
            if self.time.strip().isdecimal():
                raise UsageError(f"--time={self.time} has no unit, and Slurm reads minutes: write 30m, 3h or 00:30:00")
            seconds(self.time, "--time")  # refused before the site is asked

    @property
    def node_range(self) -> NumberRange | None:
        """The requested numbers of nodes; None: as few as the plan needs."""
        return NumberRange(self.nodes, self.nodes) if isinstance(self.nodes, int) else self.nodes

    @property
    def seconds(self) -> float | None:
        """The time limit; None: the site's default, or one that is still to be foreseen."""
        return seconds(self.time, "--time") if self.time and self.time != AUTO else None

    @property
    def own_queue(self) -> bool:
        """True if the user names a partition or quality of service, which the site's file may lack."""
        return bool(self.partition or self.qos)


def options(job: JobOptions) -> tuple[str, ...]:
    """Checks the options that are sbatch's own, and returns them in its form.

    Raises:
        UsageError: a value does not have its form, or grappe itself sets the option.
    """
    if job.queue and job.own_queue:
        raise UsageError("--queue is one of the site's queues, --partition and --qos are Slurm's own: give one of them")
    checked = []
    for name, form in VALUES.items():
        value = getattr(job, name.replace("-", "_"))
        if value is None:
            continue
        if not form.fullmatch(value):
            example = f", as {EXAMPLES[name]} is" if name in EXAMPLES else ""
            raise UsageError(f"--{name}={value!r}: this is not a valid value of sbatch's --{name}{example}")
        checked.append(f"--{name}={value}")
    if job.mem and job.mem_per_cpu:
        raise UsageError("--mem and --mem-per-cpu mean the same: give one of them")
    if job.mail_user:
        checked.append("--mail-type=END,FAIL,REQUEUE")
    for text in job.sbatch:
        read = OPTION.fullmatch(text)
        if read is None:
            raise UsageError(
                f"--sbatch {text!r}: write one option of sbatch as '--name=value', without spaces and quotes in it"
            )
        name, value = read[1], read[2] or ""
        if name in SAYS_SO:
            raise UsageError(f"--sbatch {text}: {SAYS_SO[name]} sets that")
        if name in OURS or (name == "gres" and re.search(r"\bgpu\b", value)):
            why = "--gpus sets that" if name == "gres" else "the job's script depends on it"
            raise UsageError(f"--sbatch {text}: grappe sets --{name} by itself: {why}")
    return (*checked, *job.sbatch)


def merged(ours: Iterable[str], user_options: Sequence[str]) -> list[str]:
    """Merges the options: the user's replace ours, and constraints are joined."""
    names = {_name(option) for option in user_options}
    replaced = names | ({"--mem"} if "--mem-per-cpu" in names else set())
    kept = list(ours)
    added = []
    for option in user_options:
        constraint = next((two for two in kept if _name(two) == "--constraint"), None)
        if _name(option) == "--constraint" and constraint is not None:
            option = f"--constraint={_grouped(constraint)}&{_grouped(option)}"  # noqa: PLW2901
        added.append(option)
    return [option for option in kept if _name(option) not in replaced] + added


def _name(option: str) -> str:
    return option.partition("=")[0]


def _grouped(option: str) -> str:
    value = option.partition("=")[2]
    return f"({value})" if "|" in value and not value.startswith(("(", "[")) else value
