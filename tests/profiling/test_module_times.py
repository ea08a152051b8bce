"""Module times: each module's own seconds in forward, its children's left out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grappe.profiling import chronometer
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.module_times import OUTSIDE, ModuleTimes
from grappe.profiling.phases import BACKWARD, COMMUNICATION, FORWARD, WATCHING


class Clock:
    """Stands for time.perf_counter: it moves where a module says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(chronometer.time, "perf_counter", made)
    return made


class Worker(nn.Module):
    """Computes for some seconds, then calls its children."""

    def __init__(self, clock: Clock, *children: nn.Module, seconds: float = 1.0) -> None:
        super().__init__()
        self.inside, self.seconds, self.clock = nn.ModuleList(children), seconds, clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.seconds
        for one in self.inside:
            x = one(x)
        return x


def made(clock: Clock) -> tuple[Chronometer, ModuleTimes]:
    watch = Chronometer(torch.device("cpu"), 0.0)
    watch.switch(WATCHING, clock)
    return watch, ModuleTimes(watch)


def test_children_are_left_out_and_what_no_module_takes_is_outside(clock: Clock) -> None:
    watch, times = made(clock)
    child = Worker(clock, seconds=3.0)
    parent = Worker(clock, child)
    times.start()
    for _ in range(3):
        watch.switch(FORWARD, clock)
        parent(torch.ones(1))
        watch.switch(WATCHING, clock)
        watch.end_step(clock)
        times.end_step()
    times.stop()
    found = times.seconds(forward=10.0)
    assert found == {id(parent): 1.0, id(child): 3.0, OUTSIDE: 6.0}
    parent(torch.ones(1))  # the hooks are gone
    assert times.seconds(forward=10.0) == found


def test_only_forward_counts(clock: Clock) -> None:
    watch, times = made(clock)
    module, seen = Worker(clock), []
    module.register_forward_pre_hook(lambda *_: seen.append(times.current))
    times.start()
    for phase in (FORWARD, BACKWARD):
        watch.switch(phase, clock)
        module(torch.ones(1))
    assert seen == [id(module), None]
    watch.switch(FORWARD, clock)
    assert times.current == OUTSIDE
    times.end_step()
    times.stop()
    assert times.seconds(forward=0.0)[id(module)] == 1.0


class Waiting(nn.Module):
    """Computes for 1 s, waits for other processes for 4 s, and computes for 2 s, as sync batch normalisation does."""

    def __init__(self, clock: Clock, watch: Chronometer) -> None:
        super().__init__()
        self.clock, self.watch = clock, watch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += 1.0
        self.watch.switch(COMMUNICATION, self.clock)
        self.clock.now += 4.0
        self.watch.switch(FORWARD, self.clock)
        self.clock.now += 2.0
        return x


def test_what_a_module_computes_before_a_wait_counts_and_the_wait_does_not(clock: Clock) -> None:
    watch, times = made(clock)
    module = Waiting(clock, watch)
    times.start()
    watch.switch(FORWARD, clock)
    module(torch.ones(1))
    times.end_step()
    times.stop()
    assert times.seconds(forward=3.0) == {id(module): 3.0, OUTSIDE: 0.0}


def test_a_module_that_raises_is_left() -> None:
    clock = Chronometer(torch.device("cpu"), 0.0)
    times = ModuleTimes(clock)
    times.start()
    clock.switch(FORWARD)
    with pytest.raises(TypeError):
        Worker(Clock())(1, 2)
    assert times.current == OUTSIDE
    times.stop()
