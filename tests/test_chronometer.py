"""The chronometer: a task whose phases sleep known times, under every engine, alone and among several processes."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from grappe import engines
from grappe.chronometer import Chronometer
from grappe.errors import GrappeError
from grappe.options import Options
from grappe.phases import COMMUNICATION, EVALUATION, FORWARD, IN_A_STEP, PHASES, UPDATE
from grappe.place import Place
from grappe.plan import Plan
from grappe.verbs.session import TaskReference
from grappe.verbs.train import Request
from grappe.verbs.worker import worker
from grappe.watchers.base import Outcome, Record, Watcher
from tests.processes import Pool
from tests.sleeping import Sleeping, SlowSGD

STEPS = 12
CLOSE = 0.02  # contract 8: the phases add up to the step's wall time within 2 %
TASK = Sleeping(load=0.002, forward=0.006, backward=0.009, update=0.007, late=0.012)


class Seen(Watcher):
    """What a training told its watchers, and the wall time of its steps, taken without the chronometer."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.ends: list[float] = []
        self.outcome: Outcome | None = None
        self.over = 0.0
        SlowSGD.over = staticmethod(lambda: self.ends.append(time.perf_counter()))

    def stepped(self, record: Record) -> None:
        self.steps.append(record.seconds)

    def ended(self, outcome: Outcome | None) -> None:
        self.outcome = outcome
        self.over = time.perf_counter()


def timed(place: Place, meet: Path, plan: str, task: Sleeping = TASK) -> tuple[Seen, float]:
    """A training of STEPS steps, and the seconds from its start to its end; run on several processes or one."""
    os.environ["SLEEPING_LATE"] = str(place.rank)
    seen = Seen()
    asked = Request(
        task=TaskReference.of(task),
        plan=Plan.parse(f"device=cpu,threads=1,workers=0,{plan}"),
        run=meet / f"run-{place.job}",
        base=meet,
        data=meet,
        weights=None,
        options=Options(steps=STEPS),
        quiet=True,
        also=(seen,),
    )
    began = time.perf_counter()
    worker(asked, dataclasses.replace(place, launcher="test"), meet)
    assert SlowSGD.over is not None
    SlowSGD.over = staticmethod(lambda: None)
    # Not what follows: an engine's tidying up takes seconds where DeepSpeed is slow to be collected.
    return seen, seen.over - began


def plans(processes: int) -> list[str]:
    """A plan for every engine that is installed."""
    found = []
    for name in engines.names():
        try:
            engine = engines.find(name)
        except GrappeError:
            continue
        axes = [axis for axis in ("replicate", "shard", "pipeline") if axis in engine.axes]
        text = f"engine={name}" + (f",{axes[0]}={processes}" if processes > 1 and axes else "")
        if axes and engine.refuse(Plan.parse(text)) is None:
            found.append(text)
    return found


def check(seen: Seen, whole: float, planted: dict[str, float]) -> None:
    """The phases add up, and each has at least what it slept, once for each step."""
    assert seen.outcome is not None
    timing = seen.outcome.timing
    totals = timing.totals
    assert 0.9 * whole <= sum(totals.values()) <= whole
    assert len(seen.steps) == STEPS
    # The wall time between the ends of two updates, but for the end of an epoch, when there is an evaluation.
    walls = [b - a for a, b in zip(seen.ends, seen.ends[1:], strict=False)]
    per_epoch = 4
    inside = [i for i in range(len(walls)) if (i + 1) % per_epoch]
    wall, told = sum(walls[i] for i in inside), sum(seen.steps[i + 1] for i in inside)
    assert told == pytest.approx(wall, rel=CLOSE)
    assert sum(totals[name] for name in IN_A_STEP) == pytest.approx(sum(seen.steps), rel=CLOSE)
    for name, seconds in planted.items():
        # Sleeping takes no less than it is told to.
        assert totals[name] >= STEPS * seconds, (name, totals)
    spare = sum(seen.steps) - STEPS * sum(planted.values())
    for name in IN_A_STEP:
        assert totals[name] <= STEPS * planted.get(name, 0.0) + spare + 1e-6, (name, totals)


@pytest.mark.parametrize("plan", [*plans(1), "microbatches=2", "microbatches=2,engine=textbook"])
def test_phases_of_one_process_are_what_was_planted(tmp_path: Path, plan: str) -> None:
    parts = Plan.parse(plan).microbatches
    seen, whole = timed(Place(), tmp_path, plan)
    planted = {"data": 4 * 0.002, "forward": parts * 0.006, "backward": parts * 0.009, "update": 0.007}
    check(seen, whole, planted)


@pytest.mark.parametrize(
    "plan",
    [*plans(2), "shard=2", "shard=2,zero=2", "replicate=2,microbatches=2", "replicate=2,exact=2"],
)
def test_who_waits_for_a_slow_process_spends_it_in_communication(pool: Pool, plan: str) -> None:
    fast, slow = pool.run(f"{__name__}:timed", 2, plan)
    parsed = Plan.parse(plan)
    parts = parsed.exact // 2 or parsed.microbatches
    planted = {"data": 2 * 0.002, "forward": parts * 0.006, "backward": parts * 0.009, "update": 0.007}
    check(*slow, {**planted, "forward": parts * (0.006 + 0.012)})
    check(*fast, planted)
    waited = [seen.outcome.timing.means["communication"] for seen, _ in (fast, slow)]
    # Without the warm-up, in which it is found out which gradient comes last.
    assert waited[0] >= 0.9 * parts * 0.012
    assert waited[0] > waited[1]


@pytest.mark.parametrize("plan", ["pipeline=2,microbatches=2", "pipeline=2,microbatches=4,schedule=gpipe"])
def test_stages_wait_for_each_other(pool: Pool, plan: str) -> None:
    task = dataclasses.replace(TASK, late=0.0)
    parts = Plan.parse(plan).microbatches
    first, last = pool.run(f"{__name__}:timed", 2, plan, task)
    planted = {"data": 4 * 0.002, "forward": parts * 0.003, "backward": parts * 0.0045, "update": 0.007}
    for one in (first, last):
        check(*one, planted)
    # The last stage has nothing to do until the first has sent its first microbatch on.
    assert last[0].outcome.timing.means["communication"] >= 0.9 * 0.003
    # The first waits, with its last microbatch gone, until that has gone forward and back on the last.
    assert first[0].outcome.timing.means["communication"] >= 0.9 * 0.003


def test_gradients_that_come_last_end_the_computing() -> None:
    clock = Chronometer(torch.device("cpu"), time.perf_counter())
    task = clock.watch(TASK, Plan(replicate=2, device="cpu"))
    with clock:
        model = task.model()
        task.optimizer(list(model.named_parameters()))
        for _ in range(4):
            clock.switch(FORWARD)
            task.loss(model(torch.ones(2, 3)), torch.tensor([0, 1])).sum().backward()
            assert clock.phase == (COMMUNICATION if _ == 3 else PHASES.index("backward"))
            clock.lap()


def test_an_evaluations_losses_and_waits_are_the_evaluations() -> None:
    clock = Chronometer(torch.device("cpu"), time.perf_counter())
    task = clock.watch(TASK, Plan())
    with clock, clock.during(EVALUATION):
        task.loss(torch.ones(2, 2), torch.tensor([0, 1]))
        assert clock.phase == EVALUATION
    assert not _global_optimizer_pre_hooks


def test_time_between_is_nobodys() -> None:
    clock = Chronometer(torch.device("cpu"), time.perf_counter())
    clock.begin()
    time.sleep(0.05)
    clock.forget()
    assert clock.lap() < 0.05


def test_windows_and_folding_lose_nothing() -> None:
    clock = Chronometer(torch.device("cpu"), time.perf_counter())
    clock.begin()
    seconds, steps = 0.0, 0
    for step in range(3000):
        clock.switch(FORWARD)
        clock.switch(UPDATE)
        seconds += clock.lap()
        if step % 700 == 0:
            steps += clock.window()[0]
    steps += clock.window()[0]
    timing = clock.timing()
    assert steps == 3000
    assert sum(timing.totals[name] for name in IN_A_STEP) == pytest.approx(seconds, rel=CLOSE)
    assert timing.steps == 3000 - 5
    assert sum(timing.means.values()) > 0
