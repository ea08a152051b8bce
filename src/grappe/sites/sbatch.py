"""Checks the options that a user gives to sbatch, and merges them with those that grappe sets."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from grappe.errors import UsageError

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
    "array": "--chain, or --gpus 1,2,4",
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
OURS = frozenset(
    [
        "batch",
        "chdir",
        "error",
        "export",
        "export-file",
        "get-user-env",
        "gid",
        "help",
        "ignore-pbs",
        "input",
        "kill-on-invalid-dep",
        "no-requeue",
        "open-mode",
        "output",
        "parsable",
        "quiet",
        "requeue",
        "signal",
        "test-only",
        "uid",
        "usage",
        "verbose",
        "version",
        "wait",
        "wrap",
    ]
)
"""Options of sbatch on which the job's script depends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserOptions:
    """Options of sbatch as the user gives them; None: not given."""

    mem: str | None = None
    mem_per_cpu: str | None = None
    constraint: str | None = None
    qos: str | None = None
    partition: str | None = None
    reservation: str | None = None
    dependency: str | None = None
    mail_user: str | None = None
    others: tuple[str, ...] = ()
    """All others, each as --name=value."""


def options(user_options: UserOptions) -> tuple[str, ...]:
    """Checks the options and returns them in sbatch's form.

    Raises:
        UsageError: a value has not its form, or an option is one that grappe sets by itself.
    """
    checked = []
    for field in dataclasses.fields(user_options):
        name, value = field.name.replace("_", "-"), getattr(user_options, field.name)
        if name == "others" or value is None:
            continue
        if not VALUES[name].fullmatch(value):
            example = f", as {EXAMPLES[name]} is" if name in EXAMPLES else ""
            raise UsageError(f"--{name}={value!r}: that is no value of sbatch's --{name}{example}")
        checked.append(f"--{name}={value}")
    if user_options.mem and user_options.mem_per_cpu:
        raise UsageError("--mem and --mem-per-cpu say the same in two ways: give one of them")
    if user_options.mail_user:
        checked.append("--mail-type=END,FAIL,REQUEUE")
    return (*checked, *map(_other, user_options.others))


def _other(text: str) -> str:
    read = OPTION.fullmatch(text)
    if read is None:
        raise UsageError(
            f"--sbatch {text!r}: write one option of sbatch as '--name=value', without spaces and quotes in it"
        )
    name, value = read[1], read[2] or ""
    if name in SAYS_SO:
        raise UsageError(f"--sbatch {text}: {SAYS_SO[name]} says that")
    if name in OURS or (name == "gres" and re.search(r"\bgpu\b", value)):
        why = "--gpus says that" if name == "gres" else "the job's script depends on it"
        raise UsageError(f"--sbatch {text}: grappe sets --{name} by itself: {why}")
    return text


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
