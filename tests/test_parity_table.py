"""benchmarks/results/parity.json: every engine is in it, nothing in it is beyond the tolerance, and it still holds."""

import pytest

from grappe import engines
from grappe.plan import Plan
from tests.parity import table
from tests.parity.cell import TOLERANCE
from tests.parity.optimizers import RULES
from tests.processes import Pool


def test_every_engine_and_every_plan_is_in_the_table_and_in_that_with_dropout() -> None:
    assert {Plan.parse(plan).engine for plan in table.PLANS} == set(engines.names())
    for gaps, plans in ((table.known(), table.PLANS), (table.known("drawn"), table.DRAWN_PLANS)):
        assert tuple(gaps) == plans
        assert all(0 <= gap <= TOLERANCE for gap in gaps.values())


def test_every_optimizer_is_in_the_table_under_every_plan_or_refused_by_deepspeed() -> None:
    for gaps in table.known_optimizers().values():
        assert set(gaps) == set(table.OPTIMIZER_PLANS)
        assert all(gap is None or 0 <= gap <= TOLERANCE for gap in gaps.values())
        refused = {plan for plan, gap in gaps.items() if gap is None}
        assert {"engine=deepspeed,shard=2,zero=1"} <= refused
        assert refused <= {"engine=deepspeed,shard=2,zero=1", "engine=horovod,replicate=2"}
    assert tuple(table.known_optimizers()) == RULES


@pytest.mark.parametrize(
    "plan", ["shard=2,zero=1", "pipeline=2,microbatches=4", "engine=textbook,replicate=3", "engine=lightning,shard=2"]
)
def test_it_still_holds(pool: Pool, plan: str) -> None:
    gap = table.measure(pool, plan)
    assert gap <= max(10 * table.known()[plan], 1e-7), "far from what docs/parity.md says"
