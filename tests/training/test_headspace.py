"""Headspace: what a run says that loading has cost, of planted waits and a planted slowdown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grappe.data.contention import Slowdown
from grappe.data.loading import Loading
from grappe.profiling.phases import PHASES
from grappe.profiling.summary import StepTimes, timing
from grappe.training.headspace import Headspace, headspace
from tests.data.test_loader import world

THREADS = Loading(kind="threads", workers=1)
PROCESSES = Loading(kind="processes", workers=2)


def times() -> StepTimes:
    """A training of 100 seconds."""
    totals = dict.fromkeys(PHASES, 0.0) | {"forward": 100.0, "start": 40.0}
    return timing("host", [], list(totals.values()))


def found(
    waited: float,
    computed: float,
    slowdown: Slowdown | None,
    loading: Loading = THREADS,
    *,
    tuned: bool = False,
) -> Headspace:
    contention = SimpleNamespace(computed=computed, slowdown=lambda: slowdown)
    loader = SimpleNamespace(waited=waited, contention=contention, loading=loading, dataset=object())
    return headspace(times(), [loader], world(0, 1), tuned=tuned)


def test_what_threads_take_from_steps_is_named_beside_the_waits() -> None:
    one = found(1.0, 40.0, Slowdown(seconds=0.5, error=0.01))
    assert (one.waited, one.slowed, one.share) == pytest.approx((1.0, 20.0, 0.21))
    assert str(one).startswith(
        "with infinitely fast data this run would be 27% faster (1% of its time went into waiting for samples, "
        "20% was lost to loading beside the steps): try loading=processes"
    )
    assert one.as_json()["slowed"] == 20.0


def test_an_estimate_comes_with_its_error() -> None:
    one = found(1.0, 40.0, Slowdown(seconds=0.5, error=0.1))
    assert one.error == pytest.approx(0.04)
    assert "20% was lost to loading beside the steps, give or take 4)" in str(one)


@pytest.mark.parametrize("slowdown", [None, Slowdown(seconds=0.5, error=0.3)])
def test_what_cannot_be_told_is_a_lower_bound(slowdown: Slowdown | None) -> None:
    few = found(1.0, 40.0, slowdown)
    assert (few.slowed, few.share) == (None, pytest.approx(0.01))
    assert str(few) == (
        "waiting for samples took 1.0 s, 1.0% of the time; what loading took from the steps beside it could not be told"
    )
    many = found(20.0, 40.0, slowdown)
    assert "at least 25% faster (20% of its time went into waiting for samples; what loading took" in str(
        many
    )
    assert many.as_json()["slowed"] is None


def test_loading_that_computes_little_takes_nothing() -> None:
    one = found(10.0, 1.0, None)
    assert (one.slowed, one.share) == (0.0, pytest.approx(0.1))
    assert "(10% of its time went into waiting for samples): " in str(one)


def test_the_advice_is_of_the_larger_cost() -> None:
    costs = Slowdown(seconds=0.5, error=0.01)
    assert found(1.0, 40.0, costs).advice.startswith("try loading=processes")
    assert (
        "loading=processes" not in found(1.0, 40.0, costs, tuned=True).advice
    )  # they were measured, and slower
    assert found(1.0, 40.0, costs, PROCESSES).advice.startswith("ask for ")
    assert "loading=processes" not in found(30.0, 4.0, costs).advice
    assert found(0.0, 4.0, costs).advice == ""


def test_shares_add_up_to_no_more_than_all() -> None:
    one = found(80.0, 60.0, Slowdown(seconds=1.0, error=0.0))
    assert one.share == 1.0 and one.as_json()["faster"] > 1e6
    str(one)
