"""Lets OpenMP's threads sleep while they wait on a busy machine, unless the user has chosen a wait policy."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path

POLICY = "OMP_WAIT_POLICY"
CHOICES = (POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")  # GNU's OpenMP; LLVM's and Intel's
STAT = Path("/proc/stat")
LOOKS, LOOK_SECONDS = 5, 0.004


def is_busy(stat: Path = STAT, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether other programs run on so many cores that this process's threads would have to share one.

    A Slurm job has its cores for itself, and counts as quiet. The lowest of several samples counts: a program that runs
    only for a moment does not matter. False if the system does not report the number of running threads (macOS).
    """
    if "SLURM_JOB_ID" in environment:
        return False
    cores = os.cpu_count() or 1
    others = cores
    for _ in range(LOOKS):
        # The whole machine's running and runnable threads, without this one.
        try:
            lines = stat.read_text().splitlines()
        except OSError:
            return False
        running = (int(line.split()[1]) for line in lines if line.startswith("procs_running "))
        others = min(others, next(running, 1) - 1)
        if others < 1:
            return False
        time.sleep(LOOK_SECONDS)
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return others + ours > cores


@functools.cache
def _was_busy() -> bool:
    """Asks `is_busy` once, so that a command's server and all its processes get the same answer."""
    return is_busy()


def let_threads_sleep(environment: MutableMapping[str, str] = os.environ, busy: Callable[[], bool] = _was_busy) -> None:
    """Sets OMP_WAIT_POLICY=passive on a busy machine; OpenMP reads the variable once, when torch is loaded.

    By default a thread spins for milliseconds at the end of each parallel section. If others use its core too, it
    spins while the thread that it waits for has none; on a quiet machine spinning is quicker than waking up.
    """
    if not any(name in environment for name in CHOICES) and busy():
        environment[POLICY] = "passive"


@contextlib.contextmanager
def sleeping_threads(busy: Callable[[], bool] = _was_busy) -> Iterator[None]:
    """Context in which started processes inherit sleeping threads; this process's own environment is restored."""
    before = os.environ.get(POLICY)
    let_threads_sleep(busy=busy)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(POLICY, None)
