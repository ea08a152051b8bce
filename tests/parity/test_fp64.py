"""precision=fp64 under the plans of each engine, against the plain loop in float64: nothing passes through float32."""

from __future__ import annotations

import functools

import pytest

from grappe.plan import Plan
from tests.parity import reference
from tests.parity.cell import difference
from tests.parity.drawn import Drawn
from tests.parity.optimizers import TunedTokens
from tests.parity.tasks import Images
from tests.parity.test_native import STEPS, TASKS
from tests.parity.test_special import NORMED
from tests.processes import Pool

ROUNDING = 1e-11
"""A float32 on the way would differ by 1e-8; L-BFGS makes more of a last bit than others do."""
OTHERS = {"normed": NORMED, "lbfgs": TunedTokens(by="lbfgs"), "clipped": Images(rule="adam", clip=0.5)}
CELLS = [
    ("clipped", "microbatches=2,recompute"),
    ("clipped", "replicate=2,microbatches=3"),
    ("tokens", "replicate=3"),
    ("unused", "replicate=2"),
    ("tokens", "shard=2,zero=2,recompute"),
    ("clipped", "replicate=2,shard=2"),
    ("tokens", "shard=2,offload=cpu"),
    ("tokens", "tensor=2"),
    ("tokens", "pipeline=2,microbatches=4"),
    ("clipped", "exact=2,replicate=2"),
    ("tokens", "exact=2,shard=2"),
    ("normed", "replicate=2,batchnorm=sync"),
    ("lbfgs", "shard=2"),
    ("clipped", "engine=textbook,replicate=2"),
    ("tokens", "engine=textbook,exact=2,replicate=2"),
    ("clipped", "engine=lightning,replicate=2"),
    ("tokens", "engine=lightning,shard=2"),
]


@functools.cache
def expected(name: str) -> dict:
    """Returns what the plain loop learns in float64."""
    return reference.train((TASKS | OTHERS)[name], STEPS, double=True)


@pytest.mark.parametrize(("name", "plan"), CELLS)
def test_learns_the_same_in_float64(pool: Pool, name: str, plan: str) -> None:
    text, wanted = f"{plan},precision=fp64", expected(name)
    found = pool.run("tests.parity.cell:train", Plan.parse(text).processes, (TASKS | OTHERS)[name], text, STEPS)
    gap, tensor = difference(wanted["weights"], found[0]["weights"])
    assert gap <= ROUNDING, f"{tensor} is {gap:.1e} away"
    for one in found:
        assert one["losses"] == pytest.approx(wanted["losses"], rel=ROUNDING)
        assert one["scores"].loss == pytest.approx(wanted["validation"], rel=ROUNDING)
        for mine, theirs in zip(one["norms"], wanted["norms"], strict=True):
            assert mine is None or mine == pytest.approx(theirs, rel=ROUNDING)


def test_draws_are_those_of_one_process_in_float64(pool: Pool) -> None:
    alone, spread = (
        pool.run("tests.parity.cell:train", Plan.parse(plan).processes, Drawn(), f"{plan}precision=fp64", STEPS)[0]
        for plan in ("", "shard=2,microbatches=2,")
    )
    assert difference(alone["weights"], spread["weights"])[0] <= ROUNDING
