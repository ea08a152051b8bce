"""Headspace: what a run says that loading has cost, of planted waits."""

from types import SimpleNamespace

import pytest

from grappe.data.loading import Loading
from grappe.profiling.chronometer import StepTimes, timing
from grappe.profiling.phases import PHASES
from grappe.training.headspace import Headspace, headspace
from tests.data.test_loader import world


def times() -> StepTimes:
    """A training of 100 seconds."""
    totals = dict.fromkeys(PHASES, 0.0) | {"forward": 100.0, "start": 40.0}
    return timing("host", [], list(totals.values()))


def cost(*waited: float, workers: int = 0, tuned: bool = False) -> Headspace:
    """The cost of loading samples for which each of the loaders has waited."""
    loading = Loading(kind="threads", workers=workers)
    loaders = [SimpleNamespace(waited=seconds, loading=loading, dataset=object(), stream=None) for seconds in waited]
    return headspace(times(), loaders, world(0, 1), tuned=tuned)


def test_the_waits_of_steps_and_evaluations_are_named_with_what_to_change() -> None:
    waits = cost(10.0, 10.0)
    assert (waits.waited, waits.share) == pytest.approx((20.0, 0.2))
    assert str(waits).startswith(
        "with infinitely fast data this run would be 25% faster (20% of its time went into waiting for samples): "
        "use workers=1, or store the samples decoded"
    )
    assert waits.as_json() == {"waited": 20.0, "share": 0.2, "faster": 0.25, "advice": waits.advice}


def test_advice_is_for_large_waits_that_it_can_change() -> None:
    waits = cost(1.0)
    assert str(waits) == "waiting for samples took 1.0 s, 1.0% of the time" and waits.advice == ""
    assert cost(30.0, workers=1, tuned=True).advice.startswith("ask for ")
    waits = cost(80.0, 60.0)
    assert waits.share == 1.0 and waits.as_json()["faster"] > 1e6
    str(waits)
