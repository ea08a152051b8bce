"""DeepSpeed's trainings killed and resumed: the same bits under the same plan, the same weights under another."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from grappe.checkpoint.weights import MODEL
from grappe.plan import Plan
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.run import Run
from tests import needs
from tests.faults.resume_cell import curves, hashes, samples
from tests.parity.cell import TOLERANCE, difference
from tests.parity.tasks import Images
from tests.parity.wide import Wide
from tests.processes import Pool

needs.library("deepspeed")
pytestmark = pytest.mark.usefixtures("operators")

PART = "tests.faults.resume_cell:part"
DROPPING = Images(rule="adam", dropout=0.3, clip=0.5)
NORMED = Images(rule="sgd", batchnorm=True, dropout=0.3, clip=0.5)
CELLS = [
    ("replicate=2", DROPPING),
    ("shard=2,zero=1,microbatches=2", DROPPING),
    ("shard=2,zero=2", NORMED),
    ("shard=2", DROPPING),
    ("shard=2,precision=bf16,microbatches=2", NORMED),
    ("shard=2,precision=fp16", DROPPING),
    ("shard=2,offload=cpu", DROPPING),
    ("offload=cpu", NORMED),
    ("shard=2,offload=nvme:{disk}", Wide()),
]


def run(pool: Pool, task: Task, plan: str, folder: Path, dies_at: int | None = None, **options: int | None) -> str:
    request = Options(log_samples=True, keep=100, **options)
    return pool.run(PART, Plan.parse(plan).processes, task, plan, folder, request, dies_at)[0]


@pytest.mark.parametrize(("plan", "task"), CELLS, ids=[plan for plan, _ in CELLS])
def test_the_same_plan_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path, plan: str, task: Task) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    text = f"engine=deepspeed,{plan.format(disk=disk)}"
    run(pool, task, text, tmp_path / "whole", save_every=2)
    run(pool, task, text, tmp_path / "parts", 5, save_every=2)
    assert "resuming from step 4" in run(pool, task, text, tmp_path / "parts", save_every=2)
    whole, parts = hashes(tmp_path / "whole", 6), hashes(tmp_path / "parts", 6)
    assert {name.partition(".")[0] for name in whole} >= {"json", "model", "optimizer"}
    assert parts == whole
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")
    assert samples(tmp_path / "parts") == samples(tmp_path / "whole")


def model(folder: Path, step: int) -> dict:
    checkpoint = Run(folder).latest()
    assert checkpoint.step == step
    tensors = checkpoint.read_tensors()
    return {name: tensors.read(name) for name in tensors if name.startswith(MODEL)}


WANDERER = Images(rule="adam", epochs=4, clip=0.5)


@pytest.fixture(scope="module")
def killed(pool: Pool, tmp_path_factory: pytest.TempPathFactory):
    """Runs that died at step 3, saved at step 2, by plan."""
    base = tmp_path_factory.mktemp("killed")

    @functools.cache
    def of(plan: str) -> Path:
        folder = base / (plan or "one")
        run(pool, WANDERER, f"engine=deepspeed,{plan}", folder, dies_at=3, save_every=2)
        return folder

    return of


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(pool, WANDERER, "", folder, save_every=2)
    return folder


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("shard=2", ""),
        ("", "shard=3"),
        ("shard=2,zero=1", "shard=2"),
        ("shard=2", "shard=3,zero=2"),
        ("shard=2,offload=cpu", "replicate=2"),
        ("replicate=2", "shard=2,offload=cpu"),
        ("shard=2", "shard=2,offload=cpu"),
    ],
)
def test_another_world_goes_on_with_the_same_samples(pool, tmp_path, killed, undisturbed, before, after):
    folder = tmp_path / "run"
    shutil.copytree(killed(before), folder)
    told = run(pool, WANDERER, f"engine=deepspeed,{after}", folder, save_every=2)
    assert "resuming from step 2" in told
    assert samples(folder) == samples(undisturbed)
    gap, name = difference(model(undisturbed, 12), model(folder, 12))
    assert gap <= TOLERANCE, f"{name} is {gap:.1e} away"


@pytest.mark.parametrize(("before", "after"), [("deepspeed,shard=2", "native,shard=2"), ("native", "deepspeed")])
def test_another_engine_takes_the_weights_over_and_says_so(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    run(pool, WANDERER, f"engine={before}", tmp_path / "run", steps=4, save_every=2)
    was = model(tmp_path / "run", 4)
    told = run(pool, WANDERER, f"engine={after}", tmp_path / "run", steps=5, save_every=1)
    assert "only the weights are restored" in told
    assert set(model(tmp_path / "run", 5)) == set(was)
    assert list(samples(tmp_path / "run")) == [1, 2, 3, 4, 5]
