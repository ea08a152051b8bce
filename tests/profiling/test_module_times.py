"""Module times: each module's own seconds in forward, its children's left out."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from grappe.profiling.chronometer import Chronometer
from grappe.profiling.module_times import OUTSIDE, ModuleTimes
from grappe.profiling.phases import BACKWARD, FORWARD, WATCHING

NAP = 0.02


class Sleeper(nn.Module):
    def __init__(self, *children: nn.Module, naps: int = 1) -> None:
        super().__init__()
        self.inside, self.naps = nn.ModuleList(children), naps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.naps * NAP)
        for one in self.inside:
            x = one(x)
        return x


def test_children_are_left_out_and_what_no_module_takes_is_outside() -> None:
    clock = Chronometer(torch.device("cpu"), 0.0)
    times, child = ModuleTimes(clock), Sleeper(naps=3)
    parent = Sleeper(child)
    times.start()
    for _ in range(3):
        clock.switch(FORWARD)
        parent(torch.ones(1))
        clock.switch(WATCHING)
        times.end_step()
    times.stop()
    found = times.seconds(forward=1.0)
    assert NAP <= found[id(parent)] < 3 * NAP <= found[id(child)]
    assert found[OUTSIDE] == pytest.approx(1.0 - found[id(parent)] - found[id(child)])
    parent(torch.ones(1))  # the hooks are gone
    assert times.seconds(forward=1.0) == found


def test_only_forward_counts() -> None:
    clock = Chronometer(torch.device("cpu"), 0.0)
    times, seen = ModuleTimes(clock), []
    module = Sleeper()
    module.register_forward_pre_hook(lambda *_: seen.append(times.current))
    times.start()
    for phase in (FORWARD, BACKWARD):
        clock.switch(phase)
        module(torch.ones(1))
    assert seen == [id(module), None]
    clock.switch(FORWARD)
    assert times.current == OUTSIDE
    times.end_step()
    times.stop()
    assert times.seconds(forward=0.0)[id(module)] < 2 * NAP


def test_a_module_that_raises_is_left() -> None:
    clock = Chronometer(torch.device("cpu"), 0.0)
    times = ModuleTimes(clock)
    times.start()
    clock.switch(FORWARD)
    with pytest.raises(TypeError):
        Sleeper()(1, 2)
    assert times.current == OUTSIDE
    times.stop()
