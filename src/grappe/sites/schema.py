"""Defines the content of a site's TOML file; values are checked when read, so that no value reaches a shell as code."""

from __future__ import annotations

import dataclasses
import datetime
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from grappe.errors import UsageError, nearest
from grappe.errors.foreign_text import printable

OPTION = re.compile(r"--([a-z][a-z-]*)(=[\w.,:@%/+*|&\[\]-]+)?", re.ASCII)
MODULE = re.compile(r"\w[\w.+-]*(/[\w.+-]+)*", re.ASCII)
PLACE = re.compile(r"(\$[A-Za-z_]\w*|/\w[\w.-]*)(/\w[\w.-]*)*", re.ASCII)
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
PARTITION = re.compile(r"\w[\w.-]*", re.ASCII)
# sbatch's options that describe resources: none that writes, mails, runs, or changes the environment.
RESOURCES = frozenset(re.findall(r"\S+", """
    cluster-constraint clusters comment constraint contiguous core-spec cores-per-socket cpus-per-gpu distribution
    exclude exclusive extra-node-info gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags
    hint licenses mem mem-per-cpu mem-per-gpu mincpus network nice nodelist ntasks-per-core ntasks-per-gpu
    ntasks-per-socket oversubscribe partition prefer qos reservation sockets-per-node spread-job switches
    thread-spec threads-per-core tmp tres-per-task
"""))  # fmt: skip
# Variables by which a program loads or runs what they name.
LOADERS = re.compile(
    r"LD_\w*|DYLD_\w*|PYTHON\w*|BASH_\w*|GRAPPE_\w*|PATH|ENV|IFS|SHELLOPTS|PS4|PROMPT_COMMAND|HOME", re.ASCII
)
GPUS = "{gpus}"
WARNS = "GRAPPE_WARNS"
"""Variable of a job's script: the mean use of GPUs below which the site warns, 0 to 1, and the site: "0.2 kempner"."""
KINDS: dict[Any, str] = {
    int: "a whole number", str: "a text", bool: "true or false", float: "a number", tuple: "a list",
    datetime.date: "a date",
}  # fmt: skip
LONGEST, MOST_ENTRIES, LARGEST = 500, 100, 1e6  # of a text, of a list or table, of a number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of a GPU that a job requests in place of GPUs; a job has one, and slices have no link to each other."""

    name: str
    """Name that Slurm knows it by: "a100_1g.5gb"."""
    synonyms: tuple[str, ...] = ()
    """Other names that the site accepts; its profile, the part of a name behind the last "_", needs none."""
    gpu_gb: int
    """Memory of the slice, in GB."""
    fraction: float
    """Share of the GPU's computing units that the slice has."""
    cores: int
    """Cores that the site recommends for a job."""
    memory_gb: int
    """Memory of the node that the site recommends for a job, in GB."""
    charge: float
    """Units of the site's charge for an hour of the slice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Charge:
    """The table by which a site charges an hour of what a job holds: its dearest part counts (see layout.charge)."""

    unit: Literal["RGU-hours", "billing units", "core-hours", "GPU-hours", "node-hours", "SBU"]
    gpu: float
    """Units of a GPU."""
    cores_per_unit: float | None = None
    """Number of cores that cost a unit; None: cores are not counted."""
    gb_per_unit: float | None = None
    """Gigabytes of the node's memory that cost a unit; None: memory is not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """Description of one of the site's nodes."""

    gpus: int = 0
    """Number of GPUs; 0 (the default) for CPU nodes."""
    gpu: str = ""
    """The GPU's model, for users: "A100, 40 GB"."""
    vendor: Literal["nvidia", "amd"] = "nvidia"
    """Maker of the GPUs."""
    capability: float | None = None
    """NVIDIA's compute capability of the GPUs, 7.0 for V100; None: unknown, or AMD's."""
    cores: int
    memory_gb: int | None = None
    """Memory that jobs may request on a node; None: memory follows the cores, and is not requested."""
    count: int | None = None
    """Number of such nodes; None if unknown."""
    cores_per_gpu: int | None = None
    memory_per_gpu_gb: int | None = None
    network: str = ""
    network_gbit: float | None = None
    """Gb/s of all of the node's network adapters together, in one direction; None: unknown."""
    slice: Slice | None = None
    """The slice that a job has in place of GPUs (see layout.sliced); None: whole GPUs."""

    def cores_of(self, gpus: int) -> int:
        """Returns the number of cores of a job that has `gpus` of the node's GPUs."""
        return self.cores if gpus == self.gpus else gpus * (self.cores_per_gpu or self.cores // self.gpus)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """The form in which a job requests nodes and GPUs."""

    gpus: str = ""
    """The option for GPUs on each node, with {gpus} for the number; "" for CPU nodes, and where nodes are whole."""
    options: tuple[str, ...] = ()
    """Options that every job has."""
    account: Literal["required", "optional", "none"] = "optional"
    accounts: tuple[str, ...] = ()
    """Patterns of account names: "def-*"."""
    whole_nodes: bool = False
    """Whether several GPUs are available only as whole nodes."""
    part_nodes: tuple[int, ...] = ()
    """With whole_nodes: numbers of GPUs below a whole node that are available nevertheless."""
    max_hours: float | None = None
    default_minutes: int = 60
    """The time limit when the user gives none."""
    min_minutes: int | None = None
    usual_minutes: int | None = None
    """Minutes below which a job should be a test."""
    max_gpus: int | None = None
    max_gpus_of: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The largest number of a job's GPUs by pattern of its account, where that is less than max_gpus."""
    max_jobs: int | None = None
    """The largest number of a user's jobs in the queue; each task of an array counts."""
    gpu_cores: Literal["", "least", "exact"] = ""
    """Whether fewer cores for each GPU than cores_per_gpu are refused on a part of a node, or any other number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
    """A partition or quality of service; by default a job gets the first that admits it."""

    name: str
    options: tuple[str, ...]
    max_hours: float | None = None
    min_gpus: int | None = None
    max_gpus: int | None = None
    max_nodes: int | None = None
    max_cores: int | None = None
    max_memory_gb: int | None = None
    """Memory of a job in GB. A job whose share of the node is larger than this, or max_cores, gets no more."""
    only_when_named: bool = False
    whole_nodes: bool | None = None
    """Overrides the site's whole_nodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobRules:
    """The environment of a job on a node, and the rules there."""

    environment: Literal["here", "virtualenv", "module"] = "here"
    """here: the submitting command's environment. virtualenv: made on every node. module: the modules contain torch."""
    modules: tuple[str, ...] = ()
    deepspeed_modules: tuple[str, ...] = ()
    """Further modules to load where DeepSpeed trains on GPUs, whose kernels it compiles."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    requeue: bool = True
    """Whether a job may requeue itself."""
    login_environment: bool = False
    """Whether environments are made on a login node alone, since jobs cannot write where they belong."""
    local: str = ""
    """Local scratch folder of a node, to which data can be staged."""
    local_is_memory: bool = False
    """Whether the local scratch folder is memory of the node: its files count as a job's memory."""
    scratch: str = ""
    """The shared file system for runs."""
    submit_from: str = ""
    """The folder from which jobs must be submitted, and into which they write."""
    internet: bool | None = None
    """Whether compute nodes can reach the internet; None: unknown, or in part."""
    proxy: str = ""
    """The way to parts of the internet where there is no direct one, for users."""
    mps: tuple[str, ...] = ()
    """Options that MPS needs."""
    warn_below: float | None = None
    """Mean use of a job's GPUs below which the site warns its user, 0 to 1; None: unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """The site's rule for a proof of scaling, which a proposal for many nodes has."""

    counts: int = 3
    """Least number of node counts that are measured."""
    efficiency: float = 0.75
    """Least parallel efficiency at the largest count."""
    startup: float = 0.5
    """Largest share of a run's wall time before its first step."""
    source: str = "general values: no rule of the site is known"
    """The page of the rule."""


Contents = Literal["runs", "data", "caches"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """A file system of the site."""

    place: str
    """Folder of the file system: $SCRATCH, /path/of/it."""
    holds: tuple[Contents, ...] = ()
    """Contents that should lie there; a run's checkpoints are in its folder."""
    quota: str = ""
    """The quota, for users: "20 TB and 1,000,000 files a user"."""
    purge_days: int | None = None
    """Age in days at which files are removed; None: never, or unknown."""
    backup: bool = False
    read_only: bool = False
    """Whether jobs cannot write there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """One kind of node of one cluster, to which jobs are submitted."""

    name: str
    title: str
    source: str
    """The source of the site's facts."""
    date: datetime.date
    """The date on which the facts were read."""
    ask: Ask = Ask()
    node: Node | None = None
    """The kind of node; None: read from the cluster (see `probe`)."""
    job: JobRules = JobRules()
    queue: tuple[Queue, ...] = ()
    storage: tuple[Storage, ...] = ()
    """The site's file systems."""
    slice: tuple[Slice, ...] = ()
    """Parts of GPUs that jobs can request; none: whole GPUs alone."""
    charge: Charge | None = None
    """The site's unit of charge, and its table; None: unknown."""
    scaling: Scaling = Scaling()
    note: tuple[str, ...] = ()
    """Further facts for users, a sentence each."""
    probe: Literal["", "sinfo"] = ""
    retired: str = ""
    """The reason why the site no longer accepts jobs; "" if it does."""
    cpu: str = ""
    """The site of jobs without GPUs, if those have nodes of their own."""
    detect: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables, and their values, on the site's login nodes."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Sources of facts from elsewhere, by the fact's name, like `node.network`."""
    unconfirmed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Unconfirmed facts, and their sources."""


def site(name: str, content: Mapping[str, Any], file: str) -> Site:
    """Makes the Site that a TOML file's content describes.

    Raises:
        UsageError: a key is unknown, missing, or of the wrong type or form; the message names the file and the key.
    """

    def wrong(key: str, why: str) -> UsageError:
        return UsageError(f"{file}: {key}{why}")

    made = _table(Site, {**content, "name": name}, "", wrong)
    _check(made, wrong)
    return made


Wrong = Callable[[str, str], UsageError]


def _table(cls: type, content: Mapping[str, Any], path: str, wrong: Wrong) -> Any:
    kinds = get_type_hints(cls)
    for key in content:
        if key not in kinds:
            raise wrong(f"{path}{printable(key, 80)}", f" is not a key: {nearest(key[:80], kinds)}")
    for field in dataclasses.fields(cls):
        plain = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if plain and field.name not in content:
            raise wrong(f"{path}{field.name}", " is missing")
    return cls(**{key: _value(kinds[key], value, f"{path}{key}", wrong) for key, value in content.items()})


def _value(kind: Any, value: Any, path: str, wrong: Wrong) -> Any:
    origin, choices = get_origin(kind), get_args(kind)
    if isinstance(value, list | dict) and len(value) > MOST_ENTRIES:
        raise wrong(path, f" has {len(value)} entries, more than {MOST_ENTRIES}")
    if origin in (Union, types.UnionType):
        kind = next(choice for choice in choices if choice is not type(None))
        return _value(kind, value, path, wrong)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _table(kind, value, f"{path}.", wrong)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(choices[0], item, f"{path}[{index}]", wrong) for index, item in enumerate(value))
    if origin in (Mapping, dict) or kind is Mapping:
        if isinstance(value, dict):
            kind = choices[1]
            return {_line(key, path, wrong): _value(kind, item, f"{path}.{key}", wrong) for key, item in value.items()}
        raise wrong(path, " is not a table")
    if origin is Literal:
        if isinstance(value, str) and value in choices:
            return value
        raise wrong(path, f"={_shown(value)} is not one of {', '.join(repr(choice) for choice in choices)}")
    number = type(value) in (int, float) and kind in (int, float)
    if number and not 0 < value <= LARGEST:  # nan is not, either
        raise wrong(path, f"={_shown(value)}: it must be more than 0, and at most {LARGEST:,.0f}")
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(kind, type) or type(value) is not kind:
        word = KINDS.get(get_origin(kind) or kind, "a table")
        raise wrong(path, f"={_shown(value)} is not {word}")
    return _line(value, path, wrong) if kind is str else value


def _line(text: str, path: str, wrong: Wrong) -> str:
    """A text that is one printable line: it cannot end the quotes or the comment that a script puts it in."""
    if printable(text, LONGEST) != text:
        raise wrong(path, f"={_shown(text)} is not one line of at most {LONGEST} printable characters: write it so")
    return text


def _shown(value: object) -> str:
    """A value nearly in TOML's form, for a message."""
    return printable(repr(value) if isinstance(value, str) else value, 80)


def _check(made: Site, wrong: Wrong) -> None:
    """Checks that no value that reaches the script can be more than a word for a shell."""
    options = {
        "ask.gpus": (made.ask.gpus.replace(GPUS, "1"),) if made.ask.gpus else (),  # a site of CPU nodes
        "ask.options": made.ask.options,
        "job.mps": made.job.mps,
    }
    options |= {f"queue {queue.name}": queue.options for queue in made.queue}
    folders: dict[str, tuple[str, ...]] = {"storage.place": tuple(storage.place for storage in made.storage)}
    folders |= {f"job.{key}": (getattr(made.job, key),) for key in ("local", "scratch", "submit_from")}
    forms = (
        (options, OPTION, "is not an option of sbatch: write --name or --name=value"),
        (
            {f"job.{key}": getattr(made.job, key) for key in ("modules", "deepspeed_modules")},
            MODULE,
            "is not the name of a module",
        ),
        (folders, PLACE, "is not a folder: write /path/of/it, or $VARIABLE/path"),
        ({"job.variables": tuple(made.job.variables)}, VARIABLE, "is not the name of a variable"),
        ({"queue.name": tuple(queue.name for queue in made.queue)}, PARTITION, "is not the name of a queue"),
        ({"slice.name": tuple(part.name for part in made.slice)}, PARTITION, "is not the name of a slice"),
    )
    for values, form, why in forms:
        for key, texts in values.items():
            for text in texts:
                if not form.fullmatch(text) and (text or form is not PLACE):  # no folder: there is none
                    raise wrong(key, f": {text!r} {why}")
    has_gpus = bool(made.node.gpus if made.node else made.probe)
    if has_gpus and GPUS not in made.ask.gpus and (made.ask.gpus or not made.ask.whole_nodes):
        raise wrong("ask.gpus", f"={made.ask.gpus!r} lacks {GPUS}, for the number on each node")
    for key, texts in options.items():
        for text in texts:
            match = OPTION.fullmatch(text)
            if match is not None and match[1] not in RESOURCES:
                raise wrong(key, f": --{match[1]} is not an option that a site may set: {nearest(match[1], RESOURCES)}")
    if max(made.scaling.efficiency, made.scaling.startup) > 1:
        raise wrong("scaling", " has a share above 1: write 0.75 for 75 %")
    for name in made.job.variables:
        if LOADERS.fullmatch(name):
            raise wrong("job.variables", f": {name} controls which programs load or run, which a site may not do")
    if made.node is None and not made.probe and not made.retired:
        raise wrong("node", " is missing: what one of its GPU nodes has")
