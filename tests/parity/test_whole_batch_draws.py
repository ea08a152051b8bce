"""Dropout, every other draw of a model and those by samples are one process's, under every plan that says so."""

import functools

import pytest

from grappe.plan import Plan
from tests.parity.drawn import Drawn
from tests.parity.test_native import assert_learned_alike
from tests.processes import Pool

STEPS = 5
PLANS = [
    "microbatches=3",
    "replicate=2",
    "replicate=3,microbatches=2,dropout=whole",
    "replicate=2,microbatches=2,recompute",
    "shard=2,zero=1",
    "shard=2,offload=cpu",
    "replicate=2,shard=2,recompute",
    "shard=2,zero=2,microbatches=2",
    "pipeline=2,microbatches=4",
    "pipeline=2,microbatches=4,schedule=gpipe,recompute",
    "pipeline=2,stages=2,microbatches=4,schedule=interleaved",
    "pipeline=2,microbatches=4,schedule=zero_bubble",
    "pipeline=2,microbatches=2,replicate=2",
    "pipeline=2,microbatches=2,shard=2,recompute",
    "tensor=2",
    "tensor=2,replicate=2",
    "tensor=2,shard=2,recompute",
    "tensor=4,microbatches=2",
    "engine=lightning,tensor=2",
    "engine=textbook,replicate=3",
    "engine=textbook,replicate=2,microbatches=2",
    "engine=lightning,replicate=2,microbatches=2",
    "engine=lightning,shard=2,recompute",
    "engine=deepspeed,replicate=2,microbatches=2",
    "engine=deepspeed,shard=2,recompute",
    "engine=horovod,replicate=2,microbatches=2",
]


def train(pool: Pool, plan: str) -> list[dict]:
    return pool.run("tests.parity.cell:train", Plan.parse(plan).processes, Drawn(), plan, STEPS)


@functools.cache
def alone(pool: Pool, precision: str = "fp32") -> dict:
    return train(pool, f"precision={precision}")[0]


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_draws_what_one_process_draws(pool: Pool, plan: str) -> None:
    assert_learned_alike(train(pool, plan), alone(pool), plan)


def test_draws_are_those_of_one_process_in_float64(pool: Pool) -> None:
    plan = "shard=2,microbatches=2,precision=fp64"
    assert_learned_alike(train(pool, plan), alone(pool, "fp64"), plan, 1e-11)
