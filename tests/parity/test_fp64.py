"""precision=fp64 of what the cover has no kind for: nothing passes through float32."""

from __future__ import annotations

from grappe.plan import Plan
from tests.parity import reference
from tests.parity.cell import difference
from tests.parity.drawn import Drawn
from tests.parity.optimizers import TunedTokens
from tests.parity.test_native import STEPS, check
from tests.processes import Pool

ROUNDING = 1e-11
"""A float32 on the way would differ by 1e-8; L-BFGS makes more of a last bit than others do."""


def test_lbfgs_learns_the_same_in_float64(pool: Pool) -> None:
    task = TunedTokens(by="lbfgs")
    wanted = reference.train(task, STEPS, double=True)
    check(pool, task, "shard=2,precision=fp64", wanted, tolerance=ROUNDING)


def test_draws_are_those_of_one_process_in_float64(pool: Pool) -> None:
    alone, spread = (
        pool.run("tests.parity.cell:train", Plan.parse(plan).processes, Drawn(), f"{plan}precision=fp64", STEPS)[0]
        for plan in ("", "shard=2,microbatches=2,")
    )
    assert difference(alone["weights"], spread["weights"])[0] <= ROUNDING
