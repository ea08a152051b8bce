"""The rest of a training, what it takes, and the limit that is asked for: enough, and in whole units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grappe.training.options import Options
from grappe.verbs.foresee.course import MARGIN, Costs, Course, limit

COSTS = Costs(step=0.5, evaluation=10.0, save=2.0, start=30.0)


@pytest.mark.parametrize(
    ("options", "done", "steps", "evaluations", "saves"),
    [
        (Options(), 0, 1000, 10, 10),
        (Options(), 950, 50, 1, 1),
        (Options(evaluate_every=300, save_every=600), 0, 1000, 4, 2),
        (Options(steps=150), 0, 150, 2, 2),
        (Options(steps=150), 150, 0, 0, 0),
        (Options(steps=150), 400, 0, 0, 0),
        (Options(part=0.25), 0, 250, 3, 3),
        (Options(steps_only=True, steps=3000), 0, 3000, 0, 0),
    ],
)
def test_what_is_left(options: Options, done: int, steps: int, evaluations: int, saves: int) -> None:
    found = Course.of(options, done=done, epochs=10, steps_per_epoch=100)
    assert (found.steps, found.evaluations, found.saves) == (steps, evaluations, saves)


def test_what_it_takes() -> None:
    course = Course(steps=100, evaluations=3, saves=2)
    assert COSTS.seconds(course) == 30 + 50 + 30 + 4
    unsure = Costs(step=0.5, evaluation=10.0, save=2.0, start=30.0, spread=0.5)
    assert unsure.seconds(course) == 2 * COSTS.seconds(course)  # half to twice


@given(done=st.integers(0, 900), more=st.integers(1, 99), every=st.integers(1, 400))
def test_what_is_done_is_not_left(done: int, more: int, every: int) -> None:
    options = Options(evaluate_every=every)
    a, b = (Course.of(options, done=at, epochs=1, steps_per_epoch=1000) for at in (done, done + more))
    assert a.steps - b.steps == more and a.evaluations >= b.evaluations
    assert COSTS.seconds(a) > COSTS.seconds(b)


@given(
    seconds=st.floats(0, 1e6),
    least=st.sampled_from([60, 300, 3600]),
    most=st.none() | st.integers(3600, 10**6),
)
def test_a_limit_is_enough_in_whole_units_and_never_above_the_sites(
    seconds: float, least: int, most: int | None
) -> None:
    found = limit(seconds, least, most)
    assert found >= least
    if found != most:
        assert found >= seconds * (1 + MARGIN) and found % 300 == 0
        assert found < seconds * (1 + MARGIN) + 3600 or found == least
    assert most is None or found <= most


@pytest.mark.parametrize(
    ("minutes", "found"), [(0.1, 5), (41, 50), (99, 120), (101, 135), (595, 720), (610, 780)]
)
def test_units_grow_with_the_time(minutes: float, found: int) -> None:
    assert limit(60 * minutes, 60, None) == 60 * found
