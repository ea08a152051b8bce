"""Killed and resumed: the same bits under the same plan, the same samples and weights under another."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch

from grappe.checkpoint.weights import LOCAL, MODEL, OPTIMIZER
from grappe.plan import Plan
from grappe.training.options import Options
from grappe.training.run import Run
from tests.faults.pairwise import Cell, grid, pairs, pairwise
from tests.faults.resume_cell import Loaded, curves, hashes, samples
from tests.parity.cell import TOLERANCE, difference
from tests.parity.tasks import Images
from tests.processes import Pool

PART = "tests.faults.resume_cell:part"
STEPS = 6  # two epochs of 12, 12 and 5 samples
AXES = {
    "layout": [
        "", "replicate=2", "replicate=3", "replicate=4", "shard=2", "shard=3", "replicate=2,shard=2",
        "engine=textbook,replicate=2", "engine=textbook,replicate=3",
    ],
    "zero": ["", "zero=1", "zero=2"],
    "microbatches": ["", "microbatches=2"],
    "precision": ["", "precision=bf16", "precision=fp16", "precision=fp64"],
    "batchnorm": ["plain", "batchnorm"],
    "data": ["arrays", "workers=0", "workers=2"],
    "rule": ["sgd", "adam"],
    "kill": ["first step", "epoch's end", "mid-epoch"],
}  # fmt: skip
KILLS = {"first step": (1, 1, 1), "epoch's end": (3, 3, 3), "mid-epoch": (2, 5, 4)}
"""Steps between checkpoints, the step behind which it dies, the step of the newest checkpoint then."""
WORLDS = ["", "replicate=2", "replicate=3", "shard=2", "shard=4", "replicate=2,shard=2"]


def _allowed(cell: Cell) -> bool:
    if cell["zero"] and "shard" not in cell["layout"]:
        return False
    if cell["precision"] == "precision=fp64":
        return cell["layout"] in ("", "shard=3", "engine=textbook,replicate=2", "engine=textbook,replicate=3")
    return not (cell["precision"] and "textbook" in cell["layout"])


GRID = grid(AXES, _allowed)
COVERED = {"replicate=2": "replicate=3", "replicate=4": "replicate=3", "engine=textbook,replicate=2": "its replicate=3"}
"""Layouts of the soak alone, and those whose uneven slices ask more."""
SELECTED = pairwise([cell for cell in GRID if cell["layout"] not in COVERED])
CELLS = GRID if "GRAPPE_SOAK" in os.environ else SELECTED


def plan_of(cell: Cell) -> str:
    parts = [cell["layout"], cell["zero"], cell["microbatches"], cell["precision"]]
    return ",".join(part for part in [*parts, cell["data"].removeprefix("arrays")] if part)


def task_of(cell: Cell) -> Images:
    kind = Images if cell["data"] == "arrays" else Loaded
    return kind(rule=cell["rule"], batchnorm=cell["batchnorm"] == "batchnorm", dropout=0.3, clip=0.5)


def run(pool: Pool, task: Images, plan: str, folder: Path, dies_at: int | None = None, **options: int | None) -> str:
    request = Options(log_samples=True, keep=100, **options)
    return pool.run(PART, Plan.parse(plan).processes, task, plan, folder, request, dies_at)[0]


def test_the_selection_has_every_pair_of_the_grid() -> None:
    assert len(SELECTED) <= 22
    most = [cell for cell in GRID if cell["layout"] not in COVERED]
    assert set().union(*map(pairs, SELECTED)) == set().union(*map(pairs, most))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(filter(None, cell.values())))
def test_the_same_plan_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path, cell: Cell) -> None:
    task, plan = task_of(cell), plan_of(cell)
    every, dies_at, newest = KILLS[cell["kill"]]
    run(pool, task, plan, tmp_path / "whole", save_every=every)
    run(pool, task, plan, tmp_path / "parts", dies_at, save_every=every)
    hashes(tmp_path / "parts", newest)
    assert f"resuming from step {newest}" in run(pool, task, plan, tmp_path / "parts", save_every=every)
    whole, parts = hashes(tmp_path / "whole", STEPS), hashes(tmp_path / "parts", STEPS)
    assert {name.partition(".")[0] for name in whole} >= {"json", "model", "optimizer"}
    assert (cell["batchnorm"] == "batchnorm") == any(name.startswith(LOCAL) for name in whole)
    assert parts == whole
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")
    assert samples(tmp_path / "parts") == samples(tmp_path / "whole")


@pytest.fixture(scope="module")
def killed(pool: Pool, tmp_path_factory: pytest.TempPathFactory):
    """Runs that died at step 2, by plan; and the one-process run that did not."""
    base = tmp_path_factory.mktemp("killed")

    @functools.cache
    def of(plan: str) -> Path:
        folder = base / (plan or "one")
        run(pool, WANDERER, plan, folder, dies_at=3, save_every=2)
        return folder

    return of


WANDERER = Images(rule="sgd", epochs=4, clip=0.5)
BEYOND = 12  # 10 steps after the checkpoint of step 2


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(pool, WANDERER, "", folder, save_every=2)
    return folder


def model(folder: Path) -> dict:
    checkpoint = Run(folder).latest()
    assert checkpoint.step == BEYOND
    tensors = checkpoint.read_tensors()
    return {name: tensors.read(name) for name in tensors if name.startswith(MODEL)}


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(WORLDS, 2), (WORLDS[1], WORLDS[1])])
def test_another_world_goes_on_with_the_same_samples(pool, tmp_path, killed, undisturbed, before, after):
    folder = tmp_path / "run"
    shutil.copytree(killed(before), folder)
    told = run(pool, WANDERER, after, folder, save_every=2)
    assert "resuming from step 2" in told
    assert ("changed since: plan: " in told) == (before != after)
    assert samples(folder) == samples(undisturbed)
    gap, name = difference(model(undisturbed), model(folder))
    assert gap <= TOLERANCE, f"{name} is {gap:.1e} away"


@pytest.mark.parametrize(("before", "after"), [("", "precision=fp64"), ("precision=fp64,replicate=2", "shard=2")])
def test_another_precision_goes_on_with_the_weights_and_the_optimizer(
    pool: Pool, tmp_path: Path, killed, undisturbed: Path, before: str, after: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed(before), folder)
    assert "resuming from step 2" in run(pool, WANDERER, after, folder, save_every=2)
    tensors = Run(folder).latest().read_tensors()  # type: ignore[union-attr]
    kinds = {tensors.read(name).dtype for name in tensors if name.startswith((MODEL, OPTIMIZER))}
    assert kinds == {torch.float64 if "fp64" in after else torch.float32}
    assert difference(model(undisturbed), model(folder))[0] <= TOLERANCE


@pytest.mark.parametrize(("before", "after"), [("native", "textbook"), ("textbook", "native")])
def test_another_engine_takes_the_weights_over_and_says_so(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    task = Images(rule="adam", dropout=0.3)
    run(pool, task, f"engine={before}", tmp_path / "run", steps=4, save_every=2)
    was = {name: one for name, one in hashes(tmp_path / "run", 4).items() if name.startswith(MODEL)}
    told = run(pool, task, f"engine={after}", tmp_path / "run", steps=5, save_every=1)
    assert f"from engine {before} to {after}: only the weights are restored" in told
    fresh = Run(tmp_path / "run").latest()
    tensors = fresh.read_tensors()
    counted = {
        float(tensors.read(name)) for name in tensors if name.startswith("optimizer.") and name.endswith(".step")
    }
    assert counted == {1.0}, "Adam's step counters are not those of a fresh optimizer"
    moved = hashes(tmp_path / "run", 5)
    assert set(was) <= set(moved)
    assert list(samples(tmp_path / "run")) == [1, 2, 3, 4, 5]
