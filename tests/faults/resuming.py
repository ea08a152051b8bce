"""Runs trainings of a pool's processes that die and go on, and compares them with undisturbed ones."""

import os
import shutil
from pathlib import Path
from typing import Any

from grappe.checkpoint.weights import MODEL
from grappe.plan import Plan
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.run import Run
from tests.faults.resume_cell import curves, hashes, samples
from tests.parity.cell import TOLERANCE, difference
from tests.parity.tasks import Images
from tests.processes import Pool

SOAK = "GRAPPE_SOAK" in os.environ
STEPS = 6  # two epochs of 12, 12 and 5 samples
WANDERER = Images(rule="adam", epochs=4, clip=0.5)
"""Takes 10 steps after the checkpoint of step 2: from then on a state that was lost would be seen."""


def run(pool: Pool, task: Task, plan: str, folder: Path, dies_at: int | None = None, **options: Any) -> str:
    """Trains, or goes on; what the user is told."""
    request = Options(**{"log_samples": True, "keep": 100, **options})
    function, size = "tests.faults.resume_cell:part", Plan.parse(plan).processes
    return pool.run(function, size, task, plan, folder, request, dies_at)[0]


def check_same_bits(
    pool: Pool, task: Task, plan: str, base: Path, kill: tuple[int, int, int] = (2, 5, 4), **options: Any
) -> set[str]:
    """Checks that a training that dies and goes on ends as one that does not; the names of what is saved.

    Args:
        kill: steps between checkpoints, the step behind which it dies, the step of the newest checkpoint then.
    """
    every, dies_at, newest = kill
    whole, parts = base / "whole", base / "parts"
    options["save_every"] = every
    run(pool, task, plan, whole, **options)
    run(pool, task, plan, parts, dies_at, **options)
    hashes(parts, newest)
    assert f"resuming from step {newest}" in run(pool, task, plan, parts, **options)
    saved = hashes(whole, STEPS)
    assert {name.partition(".")[0] for name in saved} >= {"json", "model", "optimizer"}
    assert hashes(parts, STEPS) == saved
    assert curves(parts) == curves(whole)
    assert samples(parts) == samples(whole)
    return set(saved)


def check_another_plan(pool: Pool, task: Task, killed: Any, plans: tuple[str, str], folder: Path) -> str:
    """Checks that a run that died goes on under another plan as the one-process run; what the user is told."""
    before, after = plans
    undisturbed = killed(task, None)
    shutil.copytree(killed(task, before), folder)
    told = run(pool, task, after, folder, save_every=2)
    assert "resuming from step 2" in told
    assert seen(folder, before + after) == seen(undisturbed, before + after)
    gap, name = difference(model(undisturbed), model(folder))
    assert gap <= TOLERANCE, f"{name} is {gap:.1e} away"
    return told


def seen(folder: Path, plans: str) -> dict[int, list[int]]:
    """The samples of each step; each stage of a pipeline takes them all."""
    of_steps = samples(folder)
    return {step: sorted(set(ids)) for step, ids in of_steps.items()} if "pipeline" in plans else of_steps


def model(folder: Path) -> dict:
    """The weights at the run's end."""
    assert Run(folder).is_finished()
    tensors = Run(folder).latest().read_tensors()
    return {name: tensors.read(name) for name in tensors if name.startswith(MODEL)}
