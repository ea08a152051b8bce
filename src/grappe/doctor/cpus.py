"""The cores that each process may use, against its threads and data workers."""

from __future__ import annotations

from collections.abc import Iterator

from grappe.doctor.finding import Finding, Patient, warning
from grappe.world import cores, own_cores


def check(patient: Patient) -> Iterator[Finding]:
    """Too many threads fight for cores; too few leave what was paid for idle."""
    plan, place = patient.plan, patient.place
    here, mine = cores(), own_cores(place)
    threads, workers = plan.threads or mine, plan.workers or 0
    yield from of_cores(here, mine, threads, workers, asked=place.cores)
    limit = patient.environment.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit) > mine:
        yield warning(
            f"OMP_NUM_THREADS={limit}, and each process has {mine} core{'s' if mine > 1 else ''}",
            "threads that wait for each other's cores made training 40 times slower here",
            f"unset it, or set it to {mine}",
        )


def of_cores(here: int, mine: int, threads: int, workers: int, asked: int | None) -> Iterator[Finding]:
    """Findings for a process that sees `here` cores, of which `mine` are its own."""
    if threads > mine:
        yield warning(
            f"threads={threads}, and each process has {mine} core{'s' if mine > 1 else ''}",
            "threads that wait for each other's cores made training 40 times slower here",
            f"use threads={mine}, or ask for more cores",
        )
    elif workers > mine:
        yield warning(
            f"workers={workers} for each process, which has {mine} core{'s' if mine > 1 else ''}",
            "loading fights with training for cores",
            f"use workers={max(0, mine - 1)}, or ask for more cores",
        )
    if asked is not None and here < asked:
        yield warning(
            f"the job asked for {asked} cores a process, and this one may use {here}",
            "srun of Slurm 22.05 to 23.02 does not take --cpus-per-task from the job",
            "start with srun --cpus-per-task=$SLURM_CPUS_PER_TASK, as grappe submit does",
        )
