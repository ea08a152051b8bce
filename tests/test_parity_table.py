"""docs/parity.json: every engine is in it, nothing in it is beyond the tolerance, and it still holds."""

from __future__ import annotations

import pytest

from grappe import engines
from grappe.plan import Plan
from tests.parity import table
from tests.parity.cell import TOLERANCE
from tests.processes import Pool


def test_every_engine_and_every_plan_is_in_the_table() -> None:
    gaps = table.known()
    assert tuple(gaps) == table.PLANS
    assert {Plan.parse(plan).engine for plan in gaps} == set(engines.names())
    assert all(0 <= gap <= TOLERANCE for gap in gaps.values())


@pytest.mark.parametrize(
    "plan",
    [
        "shard=2,zero=1",
        "pipeline=2,microbatches=4",
        "engine=textbook,replicate=3",
        "engine=lightning,shard=2",
    ],
)
def test_it_still_holds(pool: Pool, plan: str) -> None:
    gap = table.measure(pool, plan)
    assert gap <= max(10 * table.known()[plan], 1e-7), "far from what docs/parity.md says"
