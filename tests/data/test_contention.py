"""Contention: what loading takes from steps is told from a few steps beside which it is held, and costs no sample."""

from __future__ import annotations

import math
import random
import threading
import time
from itertools import pairwise

import pytest
import torch

from grappe.data import contention, threads
from grappe.data.contention import BEFORE, BUDGET, Contention
from grappe.data.loader import training_loader
from grappe.plan import Plan
from grappe.profiling.phases import COMMUNICATION, DATA, FORWARD, PHASES
from tests.data.test_loader import world
from tests.data.test_loading import WAYS, Drawn, Ten
from tests.patience import PATIENCE_SECONDS


class Planted:
    """A training on a planted clock: loading computes `busy` seconds beside a step, which costs it `slope` of them."""

    def __init__(self, slope: float, busy: float, *, ready: bool = True, noise: float = 0.0) -> None:
        self.slope, self.busy, self.is_ready, self.noise = slope, busy, ready, noise
        self.held = self.ever_held = False
        self.totals, self.steps, self.computed = [0.0] * len(PHASES), 0, 0.0
        self.draw = random.Random(7)

    def ready(self) -> bool:
        return self.is_ready

    def hold(self) -> None:
        self.held = self.ever_held = True

    def release(self) -> None:
        self.held = False

    def cpu_seconds(self) -> float:
        return self.computed

    def train(self, probe: Contention, steps: int, *, steady: bool = True) -> list[bool]:
        """Takes steps; returns which were held."""
        found = []
        for _ in range(steps):
            self.totals[DATA] += 0.7  # waits are none of the steps' computing
            self.totals[COMMUNICATION] += 0.4
            probe.begin_step(self, steady=steady)
            found.append(self.held)
            computed = 0.02 * self.busy if self.held else self.busy  # the sample at hand is loaded to its end
            self.computed += computed
            self.totals[FORWARD] += 1.0 + self.slope * computed + self.noise * self.draw.gauss(0, 1)
            self.steps += 1
            probe.end_step(self)
            assert not self.held
        return found

    def spent(self) -> tuple[int, list[float]]:
        return self.steps, list(self.totals)


@pytest.mark.parametrize("slope", [0.0, 0.25, 1.0])
def test_the_planted_slowdown_is_found(slope: float) -> None:
    training = Planted(slope, busy=0.5)
    probe = Contention(training.spent)
    training.train(probe, 200)
    found = probe.slowdown()
    assert found is not None
    assert found.seconds == pytest.approx(slope, abs=1e-9) and found.error < 1e-6
    assert probe.computed == pytest.approx(training.computed)


def test_the_error_that_is_said_covers_the_planted_slowdown() -> None:
    inside = 0
    for seed in range(40):
        training = Planted(0.5, busy=0.5, noise=0.1)
        training.draw = random.Random(seed)
        probe = Contention(training.spent)
        training.train(probe, 500)
        found = probe.slowdown()
        assert found is not None and math.isfinite(found.error)
        inside += abs(found.seconds - 0.5) <= found.error
    assert 34 <= inside <= 40  # of 95 %


def test_few_steps_are_held_and_none_of_a_short_training_is_compared() -> None:
    training = Planted(0.5, busy=0.5)
    probe = Contention(training.spent)
    held = training.train(probe, 30)
    assert probe.slowdown() is None
    held += training.train(probe, 3000)
    assert 0 < sum(held) <= 4 + 3000 / contention.EVERY
    places = [step for step, one in enumerate(held) if one]
    assert all(after - before > 2 * BEFORE for before, after in pairwise(places))
    assert sum(held[-1000:]) < sum(held[:1000])


def test_a_training_that_would_wait_for_the_held_batch_is_seldom_held() -> None:
    training = Planted(0.5, busy=0.5, ready=False)
    held = training.train(Contention(training.spent), 2000)
    assert 0 < sum(held) <= BUDGET * 2000


@pytest.mark.parametrize("why", ["computes nothing", "ways are tried", "not asked"])
def test_nothing_is_held_where_it_would_tell_nothing(why: str) -> None:
    training = Planted(0.5, busy=0.0 if why == "computes nothing" else 0.5)
    probe = Contention(None if why == "not asked" else training.spent)
    training.train(probe, 300, steady=why != "ways are tried")
    assert not training.ever_held
    assert probe.slowdown() is None
    assert probe.computed == pytest.approx(training.computed)


@pytest.mark.parametrize("plan", WAYS)
def test_a_hold_changes_no_sample(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "SOON", 5)
    monkeypatch.setattr(contention, "BUDGET", 1.0)

    def rows(probe: Contention) -> list[list[float]]:
        loader = training_loader(Ten(), Drawn(), Plan.parse(plan), world(0, 1))
        loader.contention = probe
        found = [batch.microbatches[0].inputs.flatten().tolist() for batch in loader.batches(0, 12)]
        loader.sources.close()
        return found

    held = Contention(lambda: (0, [-1.0] * len(PHASES)))  # of which any loading is a large share
    assert rows(held) == rows(Contention())
    assert held._pairs == 2


class Counted(Drawn):
    """Samples that are counted as they are loaded by threads."""

    def __init__(self) -> None:
        self.loaded = 0
        self.lock = threading.Lock()

    def sample(self, index: int, key: int) -> tuple[torch.Tensor, int]:
        with self.lock:
            self.loaded += 1
        return super().sample(index, key)


def test_held_threads_begin_no_sample_and_go_on_when_released() -> None:
    data = Counted()
    source = threads.ThreadedBatches(lambda request: data.sample(*request), list, workers=2, ahead=1)
    source.hold()
    source.begin(iter([[(0, index) for index in range(8)] for _ in range(3)]))
    assert not source.ready() and data.loaded == 0
    source.release()
    source.next()
    threads.settle()
    assert data.loaded == 16 and source.ready()
    assert source.cpu_seconds() > 0.0
    source.close()


@pytest.mark.parametrize("end", ["close", "settle"])
def test_held_threads_hold_nobody_up(end: str) -> None:
    source = threads.ThreadedBatches(lambda request: request, list, workers=2, ahead=1)
    source.hold()
    source.begin(iter([[(0, index) for index in range(8)]]))
    if end == "settle":
        threads.settle()
        assert source.next() == [(0, index) for index in range(8)]
    source.close()


@pytest.mark.parametrize("plan", ["workers=2", "workers=2,loading=threads"])
def test_a_hold_that_nobody_releases_ends_by_itself(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LONGEST_HOLD", 0.05)
    monkeypatch.setattr("grappe.data.holdable.LONGEST_HOLD", 0.05)
    loader = training_loader(Ten(), Drawn(), Plan.parse(plan), world(0, 1))
    batches = loader.batches(0, 12)
    next(batches)
    loader.sources._busy[0].hold()
    assert len(list(batches)) == 11
    loader.sources.close()


def test_worker_processes_say_what_they_have_computed_and_loaded() -> None:
    loader = training_loader(Ten(), Drawn(), Plan.parse("workers=2"), world(0, 1))
    batches = loader.batches(0, 12)
    next(batches)
    source = loader.sources._busy[0]
    limit = time.monotonic() + PATIENCE_SECONDS
    while not source.ready() and time.monotonic() < limit:
        time.sleep(0.01)
    assert source.ready() and source.cpu_seconds() > 0.0
    list(batches)
    assert not source.ready()  # all that were loaded were taken
    loader.sources.close()
