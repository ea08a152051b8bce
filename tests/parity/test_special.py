"""Parity where a plan changes more than the order of a sum: batch normalisation, lower precision, compilation."""

import pytest

from tests.parity import reference
from tests.parity.cell import TOLERANCE, difference
from tests.parity.fp16 import LOUD_STEP, Loud
from tests.parity.tasks import Images
from tests.parity.test_native import STEPS, check
from tests.processes import Pool

NORMED = Images(batchnorm=True, rule="adam", clip=0.5)


@pytest.mark.parametrize("samples", [7, 8])
@pytest.mark.parametrize("text", ["", ",recompute"])
def test_synchronised_batchnorm_does_not_see_filler_rows(pool: Pool, samples: int, text: str) -> None:
    task = Images(batchnorm=True, batch_size=3, samples=samples, epochs=3)
    check(pool, task, f"replicate=4{text}", reference.train(task, STEPS))


def test_a_microbatch_without_a_row_on_any_process_changes_no_statistics(pool: Pool) -> None:
    """5 samples in 3 slices of 2 microbatches: each second one is padding everywhere, and had a count of 0."""
    task = Images(batchnorm=True, samples=5, batch_size=5, epochs=1)
    weights = pool.run("tests.parity.cell:train", 3, task, "replicate=3,microbatches=2", 1)[0]["weights"]
    assert all(tensor.isfinite().all() for tensor in weights.values())
    batches = [tensor.item() for name, tensor in weights.items() if name.endswith("num_batches_tracked")]
    assert batches == [1] * len(batches)


@pytest.mark.parametrize(
    "plan",
    [pytest.param("replicate=3,compile", marks=pytest.mark.nightly), "replicate=2,recompute", "shard=2,channels_last"],
)
def test_batchnorm_is_synchronised_unasked(pool: Pool, plan: str) -> None:
    check(pool, NORMED, plan, reference.train(NORMED, STEPS))


@pytest.mark.parametrize("plan", ["replicate=4", "replicate=4,recompute"])
def test_local_batchnorm_does_not_see_filler_rows(pool: Pool, plan: str) -> None:
    task = Images(batchnorm=True, batch_size=5, samples=10, epochs=3)
    check(pool, task, f"{plan},batchnorm=local", reference.train(task, STEPS, ways=4))


@pytest.mark.parametrize(
    ("plan", "pieces", "ways"),
    [
        ("replicate=2", 1, 2),
        ("replicate=3", 1, 3),
        ("shard=2", 1, 2),
        ("microbatches=2", 2, 1),
        ("replicate=2,microbatches=2", 2, 2),
        ("recompute", 1, 1),
        ("recompute,microbatches=2", 2, 1),
        ("channels_last,replicate=2", 1, 2),
    ],
)
def test_local_batchnorm_is_that_of_each_slice(pool: Pool, plan: str, pieces: int, ways: int) -> None:
    check(pool, NORMED, f"{plan},batchnorm=local", reference.train(NORMED, STEPS, pieces, ways))


def test_local_and_global_statistics_are_not_the_same() -> None:
    one, two = (reference.train(NORMED, STEPS, 1, ways)["weights"] for ways in (1, 2))
    assert difference(one, two)[0] > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["compile,replicate=2", pytest.param("compile", marks=pytest.mark.nightly)])
def test_compiled_learns_the_same(pool: Pool, plan: str) -> None:
    task = Images(rule="adam", clip=0.5)
    check(pool, task, plan, reference.train(task, STEPS))


def results(pool: Pool, plan: str, size: int, task: Images) -> list[dict]:
    return pool.run("tests.parity.cell:train", size, task, plan, STEPS)


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ("", 1),
        ("replicate=2", 2),
        ("shard=2", 2),
        ("replicate=3", 3),
        ("engine=lightning", 1),
        ("engine=lightning,replicate=2", 2),
        ("engine=lightning,shard=2,microbatches=2", 2),
        ("engine=deepspeed,replicate=2", 2),
        ("engine=deepspeed,shard=2", 2),
    ],
)
def test_fp16_skips_an_infinity_everywhere(pool: Pool, plan: str, size: int) -> None:
    """One sample overflows in one process's slice: all skip that step, the ledger goes on, the schedule waits."""
    task = Loud()
    text = f"{plan},precision=fp16" if plan else "precision=fp16"
    found = results(pool, text, size, task)
    expected = [step == LOUD_STEP for step in range(STEPS)]
    assert [one["skipped"] for one in found] == [expected] * size
    lr = found[0]["lr"]
    assert lr[LOUD_STEP] == lr[LOUD_STEP + 1], "the schedule advanced on a step that was skipped"
    assert len(set(lr)) == STEPS - 1
    gap, name = difference(reference.train(task, STEPS, skip=LOUD_STEP)["weights"], found[0]["weights"])
    assert gap < 1e-2, name
