"""Every pipeline, alone and beside replicas, shards and split matrices, against one plain process: contract 7."""

from __future__ import annotations

import pytest

from tests.parity.test_native import TASKS, check, expected
from tests.processes import Pool

SCHEDULES = [
    "pipeline=2,schedule=gpipe,microbatches=3",
    "pipeline=2,microbatches=2",
    "pipeline=2,microbatches=4",
    "pipeline=2,schedule=interleaved,microbatches=4",
    "pipeline=2,schedule=zero_bubble,microbatches=4",
    "pipeline=3,schedule=gpipe,microbatches=4",
    "pipeline=3,microbatches=3",
    "pipeline=3,schedule=zero_bubble,microbatches=3",
    "pipeline=4,schedule=gpipe,microbatches=2",
    "pipeline=4,microbatches=5",
    "pipeline=4,schedule=zero_bubble,microbatches=4",
]


PRODUCTS = [
    "pipeline=2,microbatches=3,replicate=2",
    "pipeline=2,schedule=interleaved,microbatches=2,replicate=2",
    "pipeline=2,schedule=zero_bubble,microbatches=2,replicate=2",
    "pipeline=2,schedule=gpipe,microbatches=3,shard=2",
    "pipeline=2,microbatches=3,shard=2",
    "pipeline=2,microbatches=3,shard=2,zero=2",
    "pipeline=2,microbatches=2,shard=2,zero=1",
    "pipeline=2,schedule=interleaved,microbatches=4,shard=2",
    "pipeline=2,schedule=zero_bubble,microbatches=2,shard=2,zero=1",
]
OPTIONS = [
    "pipeline=2,microbatches=2,recompute",
    "pipeline=2,microbatches=2,offload=cpu",
    "pipeline=2,microbatches=2,shard=2,recompute,offload=cpu",
    "pipeline=2,microbatches=2,channels_last",
    "pipeline=2,schedule=interleaved,microbatches=4,recompute",
    "pipeline=2,microbatches=2,compile",
]
SPLIT = [
    "pipeline=2,microbatches=2,tensor=2",
    "pipeline=2,schedule=gpipe,microbatches=3,tensor=2",
    "pipeline=2,schedule=interleaved,microbatches=2,tensor=2",
    "pipeline=2,schedule=zero_bubble,microbatches=2,tensor=2",
]


@pytest.mark.parametrize("plan", SCHEDULES + PRODUCTS)
@pytest.mark.parametrize("name", ["adam", "tokens-sgd"])
def test_learns_the_same(pool: Pool, name: str, plan: str) -> None:
    check(pool, TASKS[name], plan, expected(name))


@pytest.mark.parametrize("plan", SPLIT)
@pytest.mark.parametrize("name", ["tokens", "tokens-sgd"])
def test_beside_tensor_parallelism_learns_the_same(pool: Pool, name: str, plan: str) -> None:
    check(pool, TASKS[name], plan, expected(name))


@pytest.mark.parametrize("plan", OPTIONS)
def test_options_learn_the_same(pool: Pool, plan: str) -> None:
    check(pool, TASKS["adam"], plan, expected("adam"))


@pytest.mark.parametrize("plan", ["pipeline=2,microbatches=2", "pipeline=3,microbatches=3"])
@pytest.mark.parametrize("name", ["tiny", "frozen"])
def test_hard_ones_learn_the_same(pool: Pool, name: str, plan: str) -> None:
    check(pool, TASKS[name], plan, expected(name))
