"""Runs that the fault tests share: what each process did to the disk was recorded while they saved."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from grappe.plan import Plan
from grappe.task import Task
from grappe.training.options import Options
from tests.faults.resume_cell import hashes
from tests.faults.resuming import run
from tests.faults.trace import Recorder, merged
from tests.parity.tasks import Images
from tests.processes import Pool

TASK = Images(rule="adam", dropout=0.3, clip=0.5, epochs=3)
END = 9
PLANS = ("", "shard=2", "pipeline=2,microbatches=2", "engine=deepspeed,shard=2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run with checkpoints of steps 3 and 6, of 9."""

    plan: str
    size: int
    run: Path
    recorder: Recorder
    """The save of step 6, behind which that of step 0 was removed."""
    end: dict[str, str]
    """The hashes of the checkpoint of step 9, of a run that was never disturbed."""
    go_on: Callable[[Path], str]
    """Trains a run on to step 9; what the user is told."""


@pytest.fixture(scope="session")
def recorded(pool, tmp_path_factory, request):
    """Of a plan."""

    @functools.cache
    def of(plan: str) -> Recorded:
        if "deepspeed" in plan:
            pytest.importorskip("deepspeed")
        base, size = tmp_path_factory.mktemp("recorded"), Plan.parse(plan).processes

        def train(folder: Path, steps: int, function: str = "part", *more: object) -> list:
            options = Options(steps=steps, save_every=3, keep=2)
            return pool.run(f"tests.faults.resume_cell:{function}", size, TASK, plan, folder, options, *more)

        train(base / "whole", END, "part", None)
        train(base / "run", 3, "part", None)
        return Recorded(
            plan=plan,
            size=size,
            run=base / "run",
            recorder=merged(train(base / "run", 6, "recorded")),
            end=hashes(base / "whole", END),
            go_on=lambda folder: train(folder, END, "part", None)[0],
        )

    return of


@pytest.fixture(scope="session")
def killed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Task, str | None], Path]:
    """Runs of a task under a plan that died at step 3, saved at step 2; without a plan, one process that did not."""
    base = tmp_path_factory.mktemp("killed")

    @functools.cache
    def of(task: Task, plan: str | None) -> Path:
        folder = base / f"{len(list(base.iterdir()))}"
        run(pool, task, plan or "", folder, dies_at=None if plan is None else 3, save_every=2)
        return folder

    return of
