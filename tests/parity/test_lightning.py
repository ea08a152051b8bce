"""engine=lightning against one plain process, and a killed training of it against one that was not."""

from pathlib import Path

import pytest

from grappe.training.run import Run
from tests.faults.resume_cell import samples
from tests.faults.resuming import check_another_plan, check_same_bits, run
from tests.parity import reference
from tests.parity.tasks import Images
from tests.parity.test_native import STEPS, TASKS, check, expected
from tests.parity.test_special import NORMED
from tests.parity.wide import Wide
from tests.processes import Pool

L = "engine=lightning"


@pytest.mark.parametrize(
    ("plan", "pieces", "ways"), [(f"{L},replicate=2", 1, 2), (f"{L},shard=2", 1, 2), (f"{L},microbatches=2", 2, 1)]
)
def test_local_batchnorm_is_that_of_each_slice(pool: Pool, plan: str, pieces: int, ways: int) -> None:
    check(pool, NORMED, f"{plan},batchnorm=local", reference.train(NORMED, STEPS, pieces, ways))


def test_local_batchnorm_does_not_see_filler_rows(pool: Pool) -> None:
    task = Images(batchnorm=True, batch_size=5, samples=10, epochs=3)
    check(pool, task, f"{L},replicate=4,batchnorm=local", reference.train(task, STEPS, ways=4))


@pytest.mark.parametrize(
    ("plan", "every", "dies_at"),
    [
        ("", 2, 5),
        ("replicate=2", 1, 1),
        ("replicate=3,microbatches=2", 2, 4),
        ("shard=2", 3, 3),
        ("replicate=2,precision=bf16", 2, 5),
        ("replicate=2,precision=fp16", 2, 5),
    ],
)
def test_the_same_plan_goes_on_to_the_same_bits(
    pool: Pool, tmp_path: Path, plan: str, every: int, dies_at: int
) -> None:
    """Killed in the middle of `Trainer.fit`; with dropout, batch normalisation, momentum, clipping, a schedule."""
    task = Images(rule="adam" if "shard" in plan else "sgd", batchnorm=True, dropout=0.3, clip=0.5)
    at = dies_at - dies_at % every
    check_same_bits(pool, task, f"{L},{plan}".rstrip(","), tmp_path, (every, dies_at, at))
    assert {one["samples"] for one in Run(tmp_path / "parts").records("evaluation")} == {task.samples}


@pytest.mark.parametrize(("before", "after"), [("replicate=3", "shard=2"), ("shard=2", "")])
def test_another_world_goes_on_with_the_same_samples(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    task = Images(epochs=4, clip=0.5)
    died = tmp_path / "died"
    run(pool, task, f"{L},{before}", died, dies_at=3, save_every=2)
    one = tmp_path / "one"
    run(pool, task, "", one, save_every=2)
    runs = {None: one, before: died}
    check_another_plan(pool, task, lambda _, plan: runs[plan], (before, f"{L},{after}".rstrip(",")), tmp_path / "run")


def test_the_native_engine_takes_its_weights_over(pool: Pool, tmp_path: Path) -> None:
    task = Images(rule="adam")
    run(pool, task, f"{L},replicate=2", tmp_path / "run", steps=4, save_every=2)
    told = run(pool, task, "", tmp_path / "run", steps=5)
    assert "from engine lightning to native: only the weights are restored" in told
    assert list(samples(tmp_path / "run")) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["sgd", "tokens", "tiny"])
def test_offloaded_by_deepspeeds_stage_3_learns_the_same(pool: Pool, name: str) -> None:
    check(pool, TASKS[name], f"{L},shard=2,offload=cpu,microbatches=2", expected(name))


def test_offloaded_to_a_disk_learns_the_same(pool: Pool, tmp_path: Path) -> None:
    task = Wide()  # large enough for parameters to leave the memory
    check(pool, task, f"{L},shard=2,offload=nvme:{tmp_path}", reference.train(task, STEPS))
    assert not list(tmp_path.iterdir()), "something was left on the disk"


def test_offloaded_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    task, plan = Images(dropout=0.3, clip=0.5), f"{L},shard=2,offload=cpu"
    check_same_bits(pool, task, plan, tmp_path)
