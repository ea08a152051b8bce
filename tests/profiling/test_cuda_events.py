"""Steps timed by CUDA events, with events that take their time from a list: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from grappe.profiling.chronometer import Chronometer
from grappe.profiling.cuda_events import SAMPLE
from grappe.profiling.phases import BACKWARD, EVALUATION, FORWARD, IN_A_STEP, UPDATE


class Event:
    """An event a millisecond behind the one before; the GPU has passed it at once."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 1.0
        self.at = Event.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chronometer]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with Chronometer(torch.device("cuda"), 0.0) as chronometer:
        chronometer.begin()
        yield chronometer


def step(clock: Chronometer) -> None:
    for phase in (FORWARD, BACKWARD, UPDATE):
        clock.switch(phase)
    clock.lap()


def test_one_step_of_eight_is_timed_once_it_is_warm(clock: Chronometer) -> None:
    for _ in range(3 * SAMPLE + 1):
        step(clock)
    timing = clock.timing()
    assert (timing.clock, timing.steps) == ("device", 3)
    taken = {name: timing.phases[name].median for name in IN_A_STEP if timing.phases[name].median}
    assert taken == {name: pytest.approx(1e-3) for name in ("forward", "backward", "update", "watching")}


def test_a_step_around_an_evaluation_is_left_out(clock: Chronometer) -> None:
    for number in range(2 * SAMPLE + 1):
        if number == SAMPLE:
            with clock.during(EVALUATION):
                clock.switch(FORWARD)
        step(clock)
    assert clock.timing().steps == 1
