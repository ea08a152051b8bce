"""Pipelines that are killed and go on: the same bits under the same plan; the same weights from and to other plans."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from grappe.checkpoint.weights import LOCAL
from tests.faults.resume_cell import curves, hashes, samples
from tests.faults.test_resume import BEYOND, model, run
from tests.parity.cell import TOLERANCE, difference
from tests.parity.planted import With
from tests.parity.tasks import Images
from tests.processes import Pool

STEPS = 6
RAGGED = Images(rule="adam", dropout=0.3, clip=0.5)
NORMED = Images(rule="adam", dropout=0.3, clip=0.5, batchnorm=True, batch_size=16, samples=48)
SPECTRAL = With(kind="spectral", clip=0.5)  # whose buffers each forward moves
SAME = [
    (RAGGED, "pipeline=3,schedule=gpipe,microbatches=4"),
    (RAGGED, "pipeline=2,microbatches=3,replicate=2"),
    (RAGGED, "pipeline=2,microbatches=2,shard=2,zero=1,precision=bf16"),
    (RAGGED, "pipeline=2,schedule=interleaved,microbatches=4,shard=2,precision=fp16"),
    (RAGGED, "pipeline=4,schedule=zero_bubble,microbatches=4"),
    (NORMED, "pipeline=2,microbatches=2"),
    (SPECTRAL, "pipeline=2,microbatches=2"),
    (NORMED, "pipeline=2,schedule=gpipe,microbatches=2,replicate=2,batchnorm=sync"),
]
WANDERER = Images(rule="adam", epochs=4, clip=0.5)
MOVES = [
    ("", "pipeline=2,microbatches=3"),
    ("pipeline=2,microbatches=3", ""),
    ("pipeline=4,schedule=gpipe,microbatches=2", "pipeline=2,schedule=interleaved,microbatches=4"),
    ("pipeline=2,microbatches=2,shard=2", "replicate=3"),
    ("shard=4", "pipeline=2,schedule=zero_bubble,microbatches=2,replicate=2"),
]


@pytest.mark.parametrize(("task", "plan"), SAME, ids=lambda one: str(one) if isinstance(one, str) else "")
def test_the_same_plan_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path, task: Images, plan: str) -> None:
    run(pool, task, plan, tmp_path / "whole", save_every=2)
    run(pool, task, plan, tmp_path / "parts", dies_at=5, save_every=2)
    assert "resuming from step 4" in run(pool, task, plan, tmp_path / "parts", save_every=2)
    whole = hashes(tmp_path / "whole", STEPS)
    assert {name.partition(".")[0] for name in whole} >= {"json", "model", "optimizer"}
    assert (task in (NORMED, SPECTRAL)) == any(name.startswith(LOCAL) for name in whole)
    assert hashes(tmp_path / "parts", STEPS) == whole
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")


@pytest.fixture(scope="module")
def killed(pool: Pool, tmp_path_factory: pytest.TempPathFactory):
    """Runs that died at step 3 by plan, and None: the one-process run that did not."""
    base = tmp_path_factory.mktemp("killed")

    @functools.cache
    def of(plan: str | None) -> Path:
        folder = base / (plan if plan is not None else "undisturbed")
        run(pool, WANDERER, plan or "", folder, dies_at=3 if plan is not None else None, save_every=2)
        return folder

    return of


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_another_plan_goes_on_with_the_same_samples(pool, tmp_path, killed, before, after):
    """With Adam, whose state moves along: from 10 steps on a state that was lost would be seen."""
    folder = tmp_path / "run"
    shutil.copytree(killed(before), folder)
    told = run(pool, WANDERER, after, folder, save_every=2)
    assert "resuming from step 2" in told
    samples_of = {step: sorted(ids) for step, ids in samples(folder).items() if step > 2}
    wanted = {step: sorted(ids) for step, ids in samples(killed(None)).items() if step > 2}
    assert {step: sorted(set(ids)) for step, ids in samples_of.items()} == wanted
    gap, name = difference(model(killed(None)), model(folder))
    assert gap <= TOLERANCE, f"{name} is {gap:.1e} away"


def test_the_wanderer_ends_where_the_comparison_looks(pool: Pool, killed) -> None:
    hashes(killed(None), BEYOND)
