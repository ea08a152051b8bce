"""The chronometer: a task whose phases sleep known times, under every engine, alone and among several processes."""

import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from grappe import engines
from grappe.errors import GrappeError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.plan import Plan
from grappe.profiling import chronometer
from grappe.profiling.chronometer import SAMPLE, Chronometer, waits_counted
from grappe.profiling.phases import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    EVALUATION,
    FORWARD,
    IN_A_STEP,
    START,
    UPDATE,
    WATCHING,
)
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.task_reference import TaskReference
from grappe.training.watchers.base import Outcome, Record, Watcher
from grappe.training.worker import worker
from tests.processes import Pool
from tests.sleeping import Sleeping, SlowSGD

STEPS = 12
CLOSE = 0.02  # contract 8: the phases add up to the step's wall time within 2 %
TASK = Sleeping(load=0.002, ahead=0.006, backward=0.009, update=0.007, late=0.012)


class Seen(Watcher):
    """Data that a training passed to its watchers, and its steps' wall time, taken without the chronometer."""

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


def timed(process: ProcessRank, rendezvous_folder: Path, plan: str, task: Sleeping = TASK) -> tuple[Seen, float]:
    """A training of STEPS steps, and the seconds from its start to its end; run on several processes or one."""
    os.environ["SLEEPING_LATE"] = str(process.rank)
    seen = Seen()
    request = Request(
        task=TaskReference.of(task),
        plan=Plan.parse(f"device=cpu,threads=1,workers=0,{plan}"),
        run=rendezvous_folder / f"run-{process.job}",
        base=rendezvous_folder,
        data=rendezvous_folder,
        weights=None,
        options=Options(steps=STEPS, no_check=True),  # whose time would be in a wall and in no step
        quiet=True,
        per_process_watchers=(seen,),
    )
    began = time.perf_counter()
    worker(request, dataclasses.replace(process, launcher="test"), rendezvous_folder)
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
        axes = [axis for axis in ("replicate", "shard", "pipeline") if axis in engine.supported_keys]
        text = f"engine={name}" + (f",{axes[0]}={processes}" if processes > 1 and axes else "")
        if axes and engine.unsupported_reason(Plan.parse(text)) is None:
            found.append(text)
    return found


def check(seen: Seen, whole: float, planted: dict[str, float]) -> None:
    """The phases add up, and each has at least what it slept, once for each step."""
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
    seen, whole = timed(ProcessRank(), tmp_path, plan)
    planted = {"data": 4 * 0.002, "forward": parts * 0.006, "backward": parts * 0.009, "update": 0.007}
    check(seen, whole, planted)


@pytest.mark.parametrize(
    "plan", [*plans(2), "shard=2", "shard=2,zero=2", "replicate=2,microbatches=2", "replicate=2,exact=2"]
)
def test_who_waits_for_a_slow_process_spends_it_in_communication(pool: Pool, plan: str) -> None:
    parsed = Plan.parse(plan)
    parts = parsed.exact // 2 or parsed.microbatches
    planted = {"data": 2 * 0.002, "forward": parts * 0.006, "backward": parts * 0.009, "update": 0.007}
    fast, slow = pool.run(f"{__name__}:timed", 2, plan)
    check(*slow, {**planted, "forward": parts * (0.006 + 0.012)})
    check(*fast, planted)
    means = fast[0].outcome.timing.means
    # On a busy machine the fast process is late as well, and has less to wait for.
    late = max(0.0, sum(means[name] for name in planted) - sum(planted.values()))
    # Without the warm-up, in which it is found out which gradient comes last.
    assert means["communication"] + late >= 0.9 * parts * 0.012
    assert means["communication"] + late > slow[0].outcome.timing.means["communication"]


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


def test_the_gradient_that_comes_last_ends_the_computing() -> None:
    clock = Chronometer(torch.device("cpu"), time.perf_counter(), data_parallel=True)
    with clock:
        model = TASK.model()
        named = list(model.named_parameters())
        clock.on_optimizer(TASK.optimizer(named), named)
        for step in range(4):
            clock.switch(FORWARD)
            values = TASK.loss(model(torch.ones(2, 3)), torch.tensor([0, 1]))
            clock.switch(BACKWARD)
            values.sum().backward()
            assert clock.phase == (COMMUNICATION if step == 3 else BACKWARD)
            clock.end_step()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_what_is_announced_in_an_evaluation_is_the_evaluations() -> None:
    clock = Chronometer(torch.device("cpu"), time.perf_counter())
    clock.begin()
    with clock.during(EVALUATION):
        clock.switch(FORWARD)
        time.sleep(0.02)
        clock.switch(BACKWARD)
        assert clock.phase == EVALUATION
    assert clock.phase == WATCHING
    assert clock.end_step() < 0.02
    totals = clock.timing().totals
    assert totals["evaluation"] >= 0.02
    assert totals["forward"] == totals["backward"] == 0


def waits(process: ProcessRank, rendezvous_folder: Path) -> list[int]:
    """The phases in which a collective waits: inside a step, in an evaluation, before the first step."""
    world = join(Plan(replicate=2, device="cpu"), process, rendezvous_folder)
    wait, wait_tensor = dist.Work.wait, functional.wait_tensor
    clock = Chronometer(world.device, time.perf_counter())
    phases = [clock.phase]
    switch = clock.switch
    clock.switch = lambda phase: (phases.append(phase), switch(phase))  # type: ignore[method-assign]
    with waits_counted(clock):
        dist.all_reduce(torch.ones(1))
        clock.begin()
        clock.switch(BACKWARD)
        dist.all_reduce(torch.ones(1))
        functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD))
        with clock.during(EVALUATION):
            dist.all_reduce(torch.ones(1))
    assert (dist.Work.wait, functional.wait_tensor) == (wait, wait_tensor)
    world.leave()
    return phases


def test_waits_of_torch_distributed_are_communication_inside_a_step_only(pool: Pool) -> None:
    wait = [COMMUNICATION, BACKWARD]
    for phases in pool.run(f"{__name__}:waits", 2):
        assert phases == [START, WATCHING, BACKWARD, *wait, *wait, EVALUATION, BACKWARD]


def test_one_process_waits_for_nobody() -> None:
    wait = dist.Work.wait
    with waits_counted(Chronometer(torch.device("cpu"), time.perf_counter())):
        assert dist.Work.wait is wait


def test_the_second_update_is_weighed_and_leaves_no_hook() -> None:
    clock, updates = Chronometer(torch.device("cpu"), time.perf_counter()), []
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with clock:
        clock.on_optimizer(optimizer, list(model.named_parameters()))
        for _ in range(5):
            clock.switch(UPDATE)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            clock.end_step()
            updates.append(len(optimizer._optimizer_step_pre_hooks))
    assert updates == [1, 1, 0, 0, 0]
    assert clock.optimizer is optimizer
    assert clock.held == {"parameters": 32, "gradients": 32, "optimizer": 32}
    assert [name for name, _ in clock.parameters] == ["weight", "bias"]


def test_time_before_begin_is_in_no_step() -> None:
    clock = Chronometer(torch.device("cpu"), time.perf_counter())
    clock.begin()
    time.sleep(0.05)
    clock.begin()
    assert clock.end_step() < 0.05
    assert sum(clock.timing().totals.values()) >= 0.05


def test_a_steady_step_is_in_one_file_of_profiling() -> None:
    clock = Chronometer(torch.device("cpu"), time.perf_counter())
    model = nn.Linear(3, 2)
    clock.on_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters()))
    clock.begin()
    for _ in range(5):
        clock.end_step()
    files = set()
    sys.setprofile(lambda frame, event, _: files.add(Path(frame.f_code.co_filename)))
    try:
        for phase in (DATA, FORWARD, BACKWARD, UPDATE):
            clock.switch(phase)
        clock.end_step()
    finally:
        sys.setprofile(None)
    profiling = Path(chronometer.__file__).parent
    assert [file.name for file in files if file.parent == profiling] == ["chronometer.py"]


def test_windows_and_folding_lose_nothing() -> None:
    clock = Chronometer(torch.device("cpu"), time.perf_counter())
    clock.begin()
    seconds, steps = 0.0, 0
    for step in range(3000):
        clock.switch(FORWARD)
        clock.switch(UPDATE)
        seconds += clock.end_step()
        if step % 700 == 0:
            steps += clock.window()[0]
    steps += clock.window()[0]
    timing = clock.timing()
    assert steps == 3000
    # Not timing's totals: they have what came after the last step too.
    _, spent = clock.spent()
    assert sum(spent[: len(IN_A_STEP)]) == pytest.approx(seconds)
    assert timing.steps == 3000 - 5
    assert sum(timing.means.values()) > 0


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

    def elapsed_time(self, end) -> float:
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
    clock.end_step()


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


def test_the_cpu_time_of_waits_for_data_is_that_of_every_eighth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1000))
    monkeypatch.setattr(time, "process_time", lambda: float(next(seconds)))
    clock = Chronometer(torch.device("cpu"), time.perf_counter())
    for _ in range(2 * SAMPLE):
        clock.switch(DATA)
        clock.switch(FORWARD)
        with clock.during(EVALUATION):  # whose waits are not its steps'
            clock.switch(DATA)
            clock.switch(FORWARD)
        clock.end_step()
    assert clock.loading == 2 * SAMPLE
    assert next(seconds) == 4
