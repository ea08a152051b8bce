"""Check of processes that share a GPU: NVIDIA's MPS, and the communication library."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from grappe.launch.mps import CLIENTS, PROGRAM
from grappe.verbs.doctor.checks import Finding, Machine, error, note, warning

FIRST_NCCL = (2, 30)


def check(machine: Machine) -> Iterator[Finding]:
    """Checks plans with per_device > 1."""
    import torch

    plan = machine.plan
    if torch.version.hip is not None:
        if plan.per_device > 1:
            yield note(
                "AMD's GPUs have no MPS: the processes on each share it as ROCm schedules them",
                why="it need not be quicker than one process on each",
                do="compare: grappe measure TASK --plan per_device=1 …",
            )
        return
    if plan.per_device == 1 or plan.device == "cpu" or not torch.cuda.is_available():
        return
    nccl = torch.cuda.nccl.version()[:2] if plan.backend == "nccl" else FIRST_NCCL
    yield from of_sharing(plan.per_device, plan.backend, nccl, program=shutil.which(PROGRAM) is not None)


def of_sharing(clients: int, backend: str, nccl: tuple[int, ...], *, program: bool) -> Iterator[Finding]:
    """Returns findings for `clients` processes on each GPU."""
    if not program:
        yield warning(
            f"there is no {PROGRAM} here",
            why="processes that share a GPU take turns on it instead of running together",
            do="load the site's CUDA module, or ask for nodes with MPS",
        )
    if clients > CLIENTS:
        yield error(f"per_device={clients}", why=f"MPS takes {CLIENTS} processes a GPU", do="use fewer")
    if backend == "nccl" and nccl < FIRST_NCCL:
        yield error(
            f"backend=nccl with per_device={clients}, and NCCL {'.'.join(map(str, nccl))}",
            why='before 2.30 it fails with "Duplicate GPU detected"',
            do="leave backend out: gloo carries them",
        )
