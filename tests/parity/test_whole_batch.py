"""A loss that compares samples is the global batch's under every plan."""

from __future__ import annotations

import functools

import pytest

from grappe.plan import Plan
from tests.parity import contrastive
from tests.parity.cell import TOLERANCE, difference
from tests.parity.contrastive import Pairs, Views
from tests.processes import Pool

STEPS = 6
TASKS = {
    "sgd": Pairs(),
    "weighted": Pairs(weighted=True, rule="adam"),
    "views": Views(),
    "few": Pairs(batch_size=3, samples=7, epochs=4),  # some slices have no sample
}
PLANS = [
    "",
    "microbatches=3",
    "replicate=2",
    "replicate=3,microbatches=2",
    "shard=2",
    "shard=2,zero=1,microbatches=2",
    "shard=2,microbatches=2,recompute",
    "replicate=2,shard=2",
    "exact=4",
    "exact=4,replicate=2",
    "exact=4,shard=2",
    "engine=textbook,replicate=2",
    "engine=textbook,replicate=3,microbatches=2",
    "engine=textbook,exact=4,replicate=2",
    "engine=lightning,replicate=2",
    "engine=lightning,replicate=2,microbatches=2",
    "engine=lightning,shard=2,microbatches=2",
]


PIPELINES = [
    "pipeline=2,microbatches=2",
    "pipeline=2,microbatches=4,schedule=gpipe",
    "pipeline=2,microbatches=2,replicate=2",
    "pipeline=2,microbatches=2,shard=2",
]

DRAWING = [
    "microbatches=2",
    "replicate=2,microbatches=2",
    "shard=2,microbatches=3",
    "exact=4",
    "pipeline=2,microbatches=2",
]


@functools.cache
def expected(name: str) -> dict:
    """The plain loop's result, computed once for all plans."""
    return contrastive.plain(TASKS[name], STEPS)


@pytest.mark.parametrize("name", ["sgd", "weighted", "few"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_loss_is_the_global_batchs(pool: Pool, plan: str, name: str) -> None:
    check(pool, plan, name)


@pytest.mark.parametrize("plan", PIPELINES)
def test_under_pipelines(pool: Pool, plan: str) -> None:
    check(pool, plan, "views")


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


def check(pool: Pool, plan: str, name: str) -> None:
    """Compares a cell with the plain loop."""
    wanted = expected(name)
    found = pool.run("tests.parity.cell:train", Plan.parse(plan).processes, TASKS[name], plan, STEPS)
    gap, tensor = difference(wanted["weights"], found[0]["weights"])
    assert gap <= TOLERANCE, f"{plan}: {tensor} is {gap:.1e} away"
    for one in found:
        assert one["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert one["scores"].loss == pytest.approx(wanted["validation"], rel=1e-5)
        assert one["scores"].samples == TASKS[name].samples
