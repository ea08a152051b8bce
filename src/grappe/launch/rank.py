"""ProcessRank: this process's rank and the world size, from torchrun's or srun's environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping

from grappe.errors import UsageError
from grappe.errors.foreign_text import printable

# Slurm's own steps, of salloc's shell and of the batch script, count down from the top.
INTERACTIVE_STEPS = 0xFFFFFFF0
OF_ONE_PROCESS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
)
"""Variables of torchrun and srun by which a program tells processes apart, or counts them."""
MOST_PROCESSES, DIGITS = 10**6, 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessRank:
    """Rank and world size, globally and on the node, known before the processes communicate."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "grappe"
    cores: int | None = None
    """Cores that the launcher gave this process; None if unknown."""
    job: str = ""
    """Identifies this start of this job, so that two starts do not read each other's rendezvous."""
    secret: str = dataclasses.field(default="", repr=False)
    """Text that the processes of a local launch alone know, from the command that starts them."""


def rank_from_environment(environment: Mapping[str, str] = os.environ) -> ProcessRank | None:
    """Reads the rank from torchrun's or srun's variables; None if neither started this process.

    torchrun takes precedence, as srun may have started torchrun. A step of one process is left to grappe's own
    local launch, as on a laptop.

    Raises:
        UsageError: a launcher's variables contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    # Whether srun started this process as part of a step is judged by SLURM_STEP_ID with SLURM_PROCID, never by the
    # job's name: inside salloc or a batch shell one of the two is missing. A shell of `srun --pty` has both, but
    # commands typed there are no part of the step.
    step = environment.get("SLURM_STEP_ID", "")
    names = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"}
    in_step = step.isdigit() and int(step) < INTERACTIVE_STEPS and names <= environment.keys()
    return _srun(environment) if in_step and "SLURM_PTY_PORT" not in environment else None


@contextlib.contextmanager
def hidden_rank() -> Iterator[None]:
    """Context in which this process finds none of its launcher's variables of one process."""
    hidden = {name: os.environ.pop(name) for name in OF_ONE_PROCESS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def is_main_process() -> bool:
    """Returns whether this process is process 0 or the only one, which prints results."""
    try:
        process = rank_from_environment()
    except UsageError:  # which the user is about to read
        return True
    return process is None or process.rank == 0


def _torchrun(environment: Mapping[str, str]) -> ProcessRank:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            raise UsageError(
                f"RANK and WORLD_SIZE are set, and {name} is not: unset both, or start grappe with torchrun"
            )
    size = _number("WORLD_SIZE", environment["WORLD_SIZE"], 1)
    local_size = _number("LOCAL_WORLD_SIZE", environment.get("LOCAL_WORLD_SIZE", "1"), 1, size)
    of_node = local_size if "LOCAL_WORLD_SIZE" in environment else size
    _number("MASTER_PORT", environment["MASTER_PORT"], 0, 65535)
    return ProcessRank(
        rank=_number("RANK", environment["RANK"], 0, size - 1),
        size=size,
        local_rank=_number("LOCAL_RANK", environment.get("LOCAL_RANK", "0"), 0, of_node - 1),
        local_size=local_size,
        launcher="torchrun",
        job=f"{environment.get('TORCHELASTIC_RUN_ID', 'none')}-{environment['MASTER_PORT']}",
    )


def _srun(environment: Mapping[str, str]) -> ProcessRank | None:
    size = _number("SLURM_STEP_NUM_TASKS", environment["SLURM_STEP_NUM_TASKS"], 1)
    if size == 1:
        return None
    counts: list[int] = []  # of the step's processes on each node, from a text like `2(x2),1`
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        count, _, repeat = part.partition("(x")
        each, nodes = (
            _number("SLURM_STEP_TASKS_PER_NODE", text, 1, size) for text in (count, repeat.rstrip(")") or "1")
        )
        counts += [each] * nodes
    node = _number("SLURM_NODEID", environment.get("SLURM_NODEID", "0"), 0, size)
    local_size = counts[node] if node < len(counts) else counts[0]
    return ProcessRank(
        rank=_number("SLURM_PROCID", environment["SLURM_PROCID"], 0, size - 1),
        size=size,
        local_rank=_number("SLURM_LOCALID", environment["SLURM_LOCALID"], 0, local_size - 1),
        local_size=local_size,
        cores=_number("SLURM_CPUS_PER_TASK", environment["SLURM_CPUS_PER_TASK"], 1)
        if "SLURM_CPUS_PER_TASK" in environment
        else None,
        launcher="srun",
        job="-".join(environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
    )


def _number(name: str, text: str, least: int, most: int = MOST_PROCESSES) -> int:
    """Reads a launcher's variable; raises UsageError where it is no number, or not within its bounds."""
    if text.strip().isdecimal() and len(text) < DIGITS and least <= int(text) <= most:
        return int(text)
    raise UsageError(
        f"{name}={printable(text)}, which torchrun or srun sets, is not a number from {least} to {most}: unset RANK, "
        "WORLD_SIZE and SLURM_PROCID, or start grappe with its launcher"
    )
