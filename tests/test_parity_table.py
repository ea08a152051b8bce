"""The README's parity table: every engine is in it, nothing in it is beyond the tolerance, and it is still so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from grappe import engines
from grappe.plan import Plan
from tests.parity import reference
from tests.parity.cell import TOLERANCE, difference
from tests.parity.tasks import Tokens
from tests.processes import Pool

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs import parity

GAPS = json.loads(parity.FILE.read_text())["gaps"]


def test_every_engine_and_every_plan_is_in_the_table() -> None:
    assert set(GAPS) == set(parity.PLANS)
    assert {Plan.parse(plan).engine for plan in GAPS} == set(engines.names())
    assert all(0 <= gap <= TOLERANCE for gap in GAPS.values())


@pytest.mark.parametrize(
    "plan",
    [
        "shard=2,zero=1",
        "pipeline=2,microbatches=4",
        "engine=textbook,replicate=3",
        "engine=lightning,shard=2",
    ],
)
def test_it_is_still_so(pool: Pool, plan: str) -> None:
    wanted = reference.train(Tokens(), parity.STEPS)["weights"]
    found = pool.run("tests.parity.cell:train", Plan.parse(plan).processes, Tokens(), plan, parity.STEPS)[0][
        "weights"
    ]
    gap, _ = difference(wanted, found)
    assert gap <= max(10 * GAPS[plan], 1e-7), "far from what the README says"
