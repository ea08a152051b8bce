"""The horovod engine against one plain process: contract 7. Left out, and said, where Horovod is not built."""

from __future__ import annotations

import importlib.util

import pytest

from grappe.engines.horovod import MISSING, Horovod
from grappe.errors import PlanError
from grappe.plan import Plan
from tests.parity.test_native import TASKS, check, expected
from tests.parity.test_whole_batch import check as check_whole_batch
from tests.processes import Pool

BUILT = importlib.util.find_spec("horovod") is not None
PLANS = ["engine=horovod", "engine=horovod,replicate=2", "engine=horovod,replicate=3,microbatches=2"]


@pytest.mark.grid
@pytest.mark.skipif(not BUILT, reason="Horovod is not built: make horovod")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", TASKS)
def test_learns_the_same(pool: Pool, name: str, plan: str) -> None:
    check(pool, TASKS[name], plan, expected(name))


@pytest.mark.skipif(not BUILT, reason="Horovod is not built: make horovod")
@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_of_the_whole_batch(pool: Pool, plan: str) -> None:
    check_whole_batch(pool, plan, "sgd")


def test_where_it_is_not_built_the_way_to_build_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from grappe import engines

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="make horovod"):
        engines.check(Plan.parse("engine=horovod,replicate=2"))
    assert "CVE" in MISSING and "CVE" in Horovod.about
