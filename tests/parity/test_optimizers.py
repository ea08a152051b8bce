"""Optimizers that the cover has not, against one plain process: under a kind of plan each, and with closures."""

import functools

import pytest

from tests.parity import reference
from tests.parity.optimizers import TunedImages, TunedTokens
from tests.parity.test_native import STEPS, check
from tests.processes import Pool

KINDS = ["shard=2", "tensor=2,shard=2", "pipeline=2,microbatches=4", "engine=lightning,replicate=2"]
"""For what has its code in common with one that has all plans, or treats each number by itself."""
CLOSURES = {
    "lbfgs": ("", "replicate=2", "shard=2", "shard=2,zero=1,microbatches=2", "exact=2,replicate=2"),
    "sam": ("replicate=2", "shard=2", "tensor=2,shard=2"),
}
CLOSED = {
    # A step moves the weights three times. Without a search along a line, which a last bit of the loss can turn.
    "lbfgs": TunedImages(by="lbfgs", batch_size=29, epochs=4, scheduled=False),
    "sam": TunedTokens(by="sam"),
}


@functools.cache
def expected(rule: str) -> dict:
    return reference.train(TunedTokens(by=rule), STEPS)


@functools.cache
def closed(rule: str) -> dict:
    return reference.train(CLOSED[rule], 3)


@pytest.mark.parametrize("plan", KINDS)
@pytest.mark.parametrize("rule", ["larc", "schedule-free"])
def test_its_kin_learns_the_same(pool: Pool, rule: str, plan: str) -> None:
    check(pool, TunedTokens(by=rule), plan, expected(rule))


@pytest.mark.parametrize(("rule", "plan"), [(rule, plan) for rule, plans in CLOSURES.items() for plan in plans])
def test_an_optimizer_that_calls_a_closure_learns_the_same(pool: Pool, rule: str, plan: str) -> None:
    check(pool, CLOSED[rule], plan, closed(rule), 3)


def test_larc_of_convolutions_learns_the_same(pool: Pool) -> None:
    task = TunedImages(by="larc", clip=0.5)
    check(pool, task, "shard=3", reference.train(task, STEPS))


def test_lbfgs_learns_the_same_in_float64(pool: Pool) -> None:
    """A float32 on the way would differ by 1e-8; L-BFGS makes more of a last bit than others do."""
    task = TunedTokens(by="lbfgs")
    check(pool, task, "shard=2,precision=fp64", reference.train(task, STEPS, double=True), tolerance=1e-11)
