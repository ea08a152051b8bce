"""Check of host memory: shared memory for data workers, the cgroup's limit, and a leak of the libraries."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from grappe.profiling.memory import control_group
from grappe.verbs.doctor.checks import Finding, Machine, error, warning

SHARED = Path("/dev/shm")
LEAST_SHARED = 1 << 30
LEAST_PER_PROCESS = 2 << 30
ROUNDS = 60
GROWTH = 64 << 20  # far beyond what caches take after the first rounds


def check(machine: Machine) -> Iterator[Finding]:
    """Checks memory once per node, and growth in one process."""
    if machine.is_node_leader:
        if SHARED.is_dir():
            yield from of_shared(shutil.disk_usage(SHARED).free, machine.plan.workers)
        group = control_group()
        yield from of_limit(group.size if group else None, machine.process.local_size)
        if machine.process.rank == 0:
            yield from of_growth(growth())


def of_shared(free: int, workers: int | None) -> Iterator[Finding]:
    """Returns findings for shared memory, through which data workers pass batches."""
    if workers != 0 and free < LEAST_SHARED:
        yield warning(
            f"{free / 1e9:.1f} GB of shared memory ({SHARED}) are free",
            why="data workers pass batches through it, and die with a bus error when it is full",
            do="give the container more (--shm-size, --ipc=host), or use workers=0",
        )


def of_limit(bytes_: int | None, processes: int) -> Iterator[Finding]:
    """Returns findings for the memory limit: torch alone takes about half a gigabyte per process, with CUDA two."""
    if bytes_ is not None and bytes_ < processes * LEAST_PER_PROCESS:
        yield warning(
            f"{processes} processes may use {bytes_ / 1e9:.1f} GB of memory on this node",
            why="torch with CUDA alone takes about 2 GB a process; the job is killed at the limit",
            do="ask for more memory (--mem), or for fewer processes on a node",
        )


def of_growth(grown: int) -> Iterator[Finding]:
    """Returns findings for a memory leak: old torch on CPUs with AVX512."""
    if grown > GROWTH:
        yield error(
            f"host memory grows by {grown / ROUNDS / 1e6:.1f} MB with every convolution",
            why="the job will be killed when it is used up",
            do="install a newer torch (before 1.0.1 it leaks on CPUs with AVX512)",
        )


def growth() -> int:
    """Measures this process's growth in bytes over several forwards and backwards of one small convolution."""
    import torch

    layer, batch = torch.nn.Conv2d(3, 8, 3), torch.zeros(8, 3, 32, 32)
    before = 0
    for index in range(2 * ROUNDS):
        layer(batch).sum().backward()
        if index == ROUNDS:
            before = _resident()
    return max(0, _resident() - before)


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError):  # not on macOS
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
