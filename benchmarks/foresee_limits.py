"""Whether what is called fitting runs under that limit of memory: `python -m benchmarks.foresee_limits`.

The limit is RLIMIT_DATA, which `ulimit -d` sets: a share of what grappe takes a process of the plan to need, all in
all. At a share of 1 a plan is called fitting; below, too big. A checkpoint is saved after each step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from grappe.errors import PlanError
from grappe.fields import split
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import library_memory, memory_forecast
from grappe.foresight.kernels import Kernels
from grappe.foresight.search import MemoryBudget
from grappe.plan import Plan
from grappe.training.out_of_memory import MARGIN, MemoryReport
from grappe.training.request import data_folder
from grappe.training.task_reference import TaskReference

FILE = Path(__file__).parent / "results" / "foresee_limits.json"
STEPS = 3
SHARES = (1.0, 0.95, 0.9, 0.85)
"""Of what a process is taken to need."""
BASE = 400_000_000
"""Bytes that a process has before its model, at least."""
SHORT = ("out of memory", "starts no further process or thread", "get no more memory", "failed with MemoryError")
KEPT = re.compile(r"([0-9.]+) ([kMG]?B) kept by libraries, and ([0-9.]+) ([MG]B) from before the model")
UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
TASKS = (
    "benchmarks/mlp_task.py:Mlp width=3072",
    "pysource width=512 depth=8 heads=8 batch_size=8 megabytes=0.3",
    "coatnet batch_size=16",
)
PLANS = (
    "", "microbatches=2", "recompute", "precision=bf16", "replicate=2", "shard=2", "shard=2,zero=1",
    "shard=2,zero=2,microbatches=2", "pipeline=2,microbatches=4", "pipeline=2,microbatches=4,schedule=zero_bubble",
)  # fmt: skip


def shortage(task: str, plan: str, evaluation: int) -> MemoryReport:
    """Returns what a process says after a first evaluation, if it gets no more memory.

    It says so under a limit that is too low, but not so low that the evaluation, with its peak of so many bytes, has
    no room.
    """
    for limit in range(BASE + evaluation, 3 * BASE + evaluation, BASE // 8):
        found = KEPT.search(under(task, plan, limit))
        if found is not None:
            break
    else:
        raise RuntimeError(f"{task}, {plan}: no message of what was there before the model")
    libraries, before = (int(float(found[one]) * UNITS[found[one + 1]]) for one in (1, 3))
    return MemoryReport(rank=0, held={}, other=0, before=before, libraries=libraries)


def under(task: str, plan: str, limit: int) -> str:
    """Trains a few steps by command under a limit of each process's data; returns the error's message, or nothing.

    Raises:
        RuntimeError: it failed for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "grappe",
            "train",
            *task.split(),
            "--plan",
            plan,
            "--steps",
            str(STEPS),
            "--save-every",
            "1",
        ]
        done = subprocess.run(
            [*command, "--run", f"{folder}/run"],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode and not any(words in done.stderr for words in SHORT):
        raise RuntimeError(done.stderr[-2000:])
    return done.stderr if done.returncode else ""


def tried(task: str, plan: str, taken: int) -> list[bool]:
    """Returns whether a training ran at each share of the bytes `taken`; below one at which it failed none is tried."""
    ran: list[bool] = []
    for share in SHARES:
        fails = share < 1 and not all(ran[1:])
        ran.append(not fails and not under(task, plan, int(share * taken)))
    return ran


def cells() -> Iterator[tuple[str, str]]:
    """Yields each task, with its fields, and each plan that is tried."""
    return itertools.product(TASKS, PLANS)


def main() -> None:
    """Tries what the file has not yet, or all again."""
    found = {} if "--again" in sys.argv or not FILE.exists() else json.loads(FILE.read_text())
    for task, plan in cells():
        key = f"{task} | {plan}"
        if key in found:
            continue
        name, *fields = task.split()
        fake_model = FakeModel(TaskReference.of(name, split(fields)).resolve(), data_folder(), kernels=Kernels())
        try:
            needs = memory_forecast(fake_model, Plan.parse(plan))
        except PlanError:  # the task does not support the plan
            continue
        if needs.most is None:
            continue
        libraries = library_memory(fake_model.of(Plan.parse(plan)), Plan.parse(plan), fake_model.task.batch_size)
        needs = dataclasses.replace(needs, libraries=libraries)
        if needs.libraries is None:
            raise RuntimeError(f"{key}: the kernels could not be run")
        short = shortage(task, plan, needs.evaluation or 0)
        budget = MemoryBudget(whose="", size=0, beyond=short.beyond, libraries=short.assumed, margin=MARGIN, gpu=False)
        taken = budget.taken(needs)
        found[key] = {
            "peak": needs.most,
            "libraries": max(short.assumed.evaluation, needs.libraries.evaluation) + needs.libraries.step,
            "needed": taken,
            "ran": dict(zip(map(str, SHARES), tried(task, plan, taken), strict=True)),
        }
        print(key, found[key], flush=True)
        FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
