"""A loss that compares samples: two towers, weights, empty slices, and its two passes. Its plans are the cover's."""

import pytest

from grappe.plan import Plan
from tests.parity import contrastive
from tests.parity.contrastive import Means, Pairs, Views
from tests.parity.test_native import STEPS, check
from tests.processes import Pool

TASKS = {
    "sgd": Pairs(),
    "weighted": Pairs(weighted=True, rule="adam"),
    "mean": Means(),
    "few": Pairs(batch_size=3, samples=7, epochs=4),  # some slices have no sample
}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("sgd", "shard=2,microbatches=2,recompute"),
        ("weighted", "replicate=3,microbatches=2"),
        ("mean", "replicate=3"),
        ("mean", "shard=2,microbatches=2"),
        ("weighted", "exact=4,replicate=2"),
        ("few", "replicate=3,microbatches=2"),
        ("few", "shard=2,zero=1,microbatches=2"),
        ("few", "exact=4,shard=2"),
        ("few", "engine=lightning,replicate=2,microbatches=2"),
    ],
)
def test_the_loss_is_the_global_batchs(pool: Pool, name: str, plan: str) -> None:
    check(pool, TASKS[name], plan, contrastive.plain(TASKS[name], STEPS))


@pytest.mark.parametrize(
    "plan",
    ["microbatches=2", "replicate=2,microbatches=2", "shard=2,microbatches=3", "exact=4", "pipeline=2,microbatches=2"],
)
def test_the_first_pass_draws_the_same(pool: Pool, plan: str) -> None:
    """With dropout, the outputs of both passes are equal to the bit: the first leaves the generators as they were."""
    task = Views(dropout=0.4)
    found = pool.run("tests.parity.contrastive:both_passes", Plan.parse(plan).processes, task, plan)
    assert sum(one["passes"] for one in found)
    assert all(one["equal"] for one in found)


@pytest.mark.parametrize("plan", ["exact=4,replicate=2", "exact=4,shard=2", "exact=4,engine=textbook,replicate=4"])
def test_the_same_bits(pool: Pool, plan: str) -> None:
    task = Views(dropout=0.4)
    [alone] = pool.run("tests.parity.cell:train", 1, task, plan.split(",", maxsplit=1)[0], STEPS)
    found = pool.run("tests.parity.cell:train", Plan.parse(plan).processes, task, plan, STEPS)
    assert found[0]["losses"] == alone["losses"]
    for name, tensor in alone["weights"].items():
        assert tensor.equal(found[0]["weights"][name]), name
