"""Headspace: what a run says that loading has cost, of planted waits."""

from types import SimpleNamespace

import pytest

from grappe.data.loading import Loading
from grappe.profiling.chronometer import StepTimes, timing
from grappe.profiling.phases import PHASES
from grappe.training.headspace import Headspace, headspace
from tests.data.test_loader import world


def times(seconds: float = 100.0) -> StepTimes:
    """Makes a training that takes `seconds` after its start."""
    totals = dict.fromkeys(PHASES, 0.0) | {"forward": seconds, "start": 40.0}
    return timing("host", [], list(totals.values()))


def cost(*waited: float, workers: int = 0, tuned: bool = False, seconds: float = 100.0) -> Headspace:
    """The cost of loading samples for which each of the loaders has waited."""
    loading = Loading(kind="threads", workers=workers)
    loaders = [SimpleNamespace(waited=seconds, loading=loading, dataset=object(), stream=None) for seconds in waited]
    return headspace(times(seconds), loaders, world(0, 1), tuned=tuned)


def test_the_waits_of_steps_and_evaluations_are_named_with_what_to_change() -> None:
    waits = cost(10.0, 10.0)
    assert (waits.waited, waits.share) == pytest.approx((20.0, 0.2))
    assert waits.advice == "try workers=1 in --plan"
    assert waits.as_json() == {"waited": 20.0, "share": 0.2, "faster": 0.25, "advice": waits.advice}


def test_advice_is_for_large_waits_that_it_can_change() -> None:
    waits = cost(1.0)
    assert waits.advice == ""
    assert cost(20.0, seconds=29.0).advice == ""  # a short training
    assert cost(30.0, workers=1, tuned=True).advice.startswith("ask for ")
    waits = cost(80.0, 60.0)
    assert waits.share == 1.0 and waits.as_json()["faster"] > 1e6
