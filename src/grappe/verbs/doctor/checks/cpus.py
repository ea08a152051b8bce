"""Check of the cores that each process may use, against its threads and data workers."""

from __future__ import annotations

from collections.abc import Iterator

from grappe.launch.world import cores, own_cores
from grappe.verbs.doctor.checks import Finding, Machine, warning
from grappe.words import count_of


def check(machine: Machine) -> Iterator[Finding]:
    """Checks for too many threads, which compete for cores, and for too few, which leave cores idle."""
    plan, process = machine.plan, machine.process
    usable, own = cores(), own_cores(process)
    threads, workers = plan.threads or own, plan.workers or 0
    yield from of_cores(usable, own, threads, workers, requested=process.cores)
    limit = machine.environment.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit) > own:
        yield warning(
            f"OMP_NUM_THREADS={limit}, and each process has {count_of(own, 'core')}",
            why="threads that wait for each other's cores made training 40 times slower here",
            do=f"unset it, or set it to {own}",
        )


def of_cores(usable: int, own: int, threads: int, workers: int, requested: int | None) -> Iterator[Finding]:
    """Returns findings for a process that may use `usable` cores, `own` of them alone."""
    if threads > own:
        yield warning(
            f"threads={threads}, and each process has {count_of(own, 'core')}",
            why="threads that wait for each other's cores made training 40 times slower here",
            do=f"use threads={own}, or ask for more cores",
        )
    elif workers > own:
        yield warning(
            f"workers={workers} for each process, which has {count_of(own, 'core')}",
            why="loading competes with training for cores",
            do=f"use workers={max(0, own - 1)}, or ask for more cores",
        )
    if requested is not None and usable < requested:
        yield warning(
            f"the job asked for {requested} cores a process, and this one may use {usable}",
            why="srun of Slurm 22.05 to 23.02 does not take --cpus-per-task from the job",
            do="start with srun --cpus-per-task=$SLURM_CPUS_PER_TASK, as grappe submit does",
        )
