"""Whether what is called fitting runs under that limit of memory: `python -m benchmarks.foresee_limits`.

The limit is RLIMIT_DATA, which `ulimit -d` sets: what a process has before its model, and a share of what grappe takes
the plan to need, its reserve of a tenth included. At a share of 1 a plan is called fitting; below, too big.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from grappe.errors import PlanError
from grappe.fields import split
from grappe.foresight import compose
from grappe.foresight.kernels import Kernels
from grappe.foresight.search import Room
from grappe.foresight.sketch import Sketch
from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.plan import Plan
from grappe.profiling import memory
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.task_reference import TaskReference
from grappe.training.worker import worker as train_worker

FILE = Path(__file__).parent.parent / "docs" / "foresee_limits.json"
STEPS = 3
SHARES = (1.0, 0.95, 0.9, 0.8)
"""Of what a plan is taken to need, with the reserve of a tenth: 0.909 is the foreseen peak itself."""
TASKS = ("benchmarks/mlp_task.py:Mlp width=3072", "pysource width=512 depth=8 heads=8 batch_size=8", "coatnet batch_size=16")
PLANS = (
    "", "microbatches=2", "recompute", "precision=bf16", "replicate=2", "shard=2", "shard=2,zero=1",
    "shard=2,zero=2,microbatches=2", "pipeline=2,microbatches=4", "pipeline=2,microbatches=4,schedule=zero_bubble",
)  # fmt: skip


def before(request: Request, process: ProcessRank, rendezvous_folder: Path) -> list[int]:
    """Trains a step; on process 0 returns the bytes that RLIMIT_DATA counts of each process before its model."""
    found: list[int] = []

    def noted() -> int:
        found.append(plain())
        return found[-1]

    plain = memory.data_size
    with mock.patch.object(memory, "data_size", noted):
        train_worker(request, process, rendezvous_folder)
    (request.base / f"{process.rank}.json").write_text(json.dumps(found[0] if found else plain()))
    return found[:1]


def besides(task: str, plan: str) -> int:
    """Measures the bytes of the process that has most before its model."""
    name, *fields = task.split()
    with tempfile.TemporaryDirectory() as folder:
        request = Request(
            task=TaskReference.of(name, split(fields)),
            plan=Plan.parse(plan),
            base=Path(folder),
            run=Path(folder) / "run",
            quiet=True,
            options=Options(steps=1, bare=True),
        )
        start("benchmarks.foresee_limits:before", request, request.plan)
        return max(
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(request.plan.processes)
        )


def runs(task: str, plan: str, limit: int) -> bool:
    """Trains a few steps by command under a limit of each process's data; returns whether it ran.

    Raises:
        RuntimeError: it failed for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "grappe", "train", *task.split(), "--plan", plan, "--steps", str(STEPS)]
        done = subprocess.run(
            [*command, "--run", f"{folder}/run"],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode and "out of memory" not in done.stderr.lower():
        raise RuntimeError(done.stderr[-2000:])
    return done.returncode == 0


def cells() -> Iterator[tuple[str, str]]:
    """Yields each task, with its fields, and each plan that is tried."""
    for task in TASKS:
        for plan in PLANS:
            yield task, plan


def main() -> None:
    """Tries what the file has not yet, or all again."""
    found = {} if "--again" in sys.argv or not FILE.exists() else json.loads(FILE.read_text())
    for task, plan in cells():
        key = f"{task} | {plan}"
        if key in found:
            continue
        name, *fields = task.split()
        sketch = Sketch(TaskReference.of(name, split(fields)).resolve(), data_folder(), kernels=Kernels())
        try:
            needs = compose.needs(sketch, Plan.parse(plan))
        except PlanError:  # the task does not support the plan
            continue
        if needs.most is None:
            continue
        room = Room(whose="", size=0, besides=besides(task, plan), gpu=False)
        taken = room.needed(needs.most)
        limits = {share: room.besides + int(share * (taken - room.besides)) for share in SHARES}
        found[key] = {
            "before": room.besides,
            "peak": needs.most,
            "ran": {str(share): runs(task, plan, limit) for share, limit in limits.items()},
        }
        print(key, found[key], flush=True)
        FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
