"""A training that stands still is ended with a word on why; one that is slow is left alone."""

import dataclasses
import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.autograd import graph
from torch.distributed import distributed_c10d

from grappe.errors import user_line
from grappe.profiling.phases import BACKWARD, CHECKPOINT, COMMUNICATION, EVALUATION, FORWARD
from grappe.training.run import Run
from grappe.training.watchdog import Standstill, Watchdog, against_nodes, cpu_seconds, sentence, waits_in
from tests.commands import GRAPPE, Command, pids_in_training, until
from tests.patience import PATIENCE_SECONDS

STUCK = str(Path(__file__).with_name("stuck.py"))
HERE = "threads=1,workers=0,device=cpu"
Start = Callable[..., Command]


@pytest.fixture
def start(start: Start) -> Start:
    """Starts trainings of tests/faults/stuck.py."""

    def begin(name: str, *arguments: str, plan: str = "replicate=2") -> Command:
        return start(GRAPPE, "train", f"{STUCK}:{name}", "--plan", f"{plan},{HERE}", "--run", "run", *arguments)

    return begin


def test_data_that_never_come_are_named_with_their_line(start: Start, tmp_path: Path) -> None:
    code, _, err = start("Sleepy", "--stall-limit", "3s").end()
    assert code == 1, err
    found = re.search(r"process ([01]) of 2 on \S+ makes no progress in step (\d+), at (\S+), line \d+", err)
    assert found, err
    assert found[3] == STUCK
    assert "in __getitem__(): time.sleep(3600); the others wait for it" in err
    reports = [(tmp_path / f"run/logs/stall-rank-{rank}.txt").read_text() for rank in range(2)]
    causes = int(found[1])
    assert '"waits": false' in reports[causes]
    assert '"waits": true' in reports[1 - causes]
    assert "__getitem__" in reports[causes]


SILENT = """
import queue, sys
from pathlib import Path
from grappe.launch.rank import ProcessRank
from grappe.training import watchdog
said = queue.Queue()
watchdog.complain = said.put
watchdog.IDLE_SECONDS = 1.0
watchdog.watch_idle(0.0, ProcessRank(launcher="grappe", size=int(sys.argv[1])), Path.cwd())
try:
    print(said.get(timeout=float(sys.argv[2])))
except queue.Empty:
    print("goes on")
"""


@pytest.mark.parametrize("others", [False, True])
def test_a_script_that_does_nothing_is_named_and_goes_on_unless_another_process_works(others, tmp_path):
    script = tmp_path / "silent.py"
    script.write_text(SILENT)
    # A process of its own: what the test Slurm's daemons compute counts as work of the process that runs the tests.
    # With others this one is silent, and the other does not answer, since it works.
    patience = 4.0 if others else PATIENCE_SECONDS / 2
    arguments = [sys.executable, str(script), str(1 + others), str(patience)]
    why = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    if others:
        assert why == "goes on\n"
    else:
        assert "process 0 of 1" in why and "makes no progress in its program, at" in why and "silent.py" in why


@pytest.mark.parametrize(
    ("file", "waits"),
    [("/usr/lib/python3/pdb.py", True), ("/x/debugpy/_vendored/pydevd/pydevd.py", True), ("/x/my_pdb.py", False)],
)
def test_who_waits_for_a_debugger_is_excused(tmp_path: Path, file: str, waits: bool) -> None:
    stack = traceback.StackSummary.from_list([("train.py", 1, "main", ""), (file, 2, "interaction", "")])
    assert watchdog(tmp_path, rank=0, size=1)._standstill(stack).excused is waits


def test_the_work_of_started_processes_counts() -> None:
    before = cpu_seconds()
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until(lambda: cpu_seconds() - before > 0.2, "a started process's work is seen")
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize(("rank", "plan"), [(0, "replicate=2"), (1, "replicate=2"), (0, "pipeline=2,microbatches=2")])
def test_a_stopped_process_is_named_by_the_other(start: Start, tmp_path: Path, rank: int, plan: str) -> None:
    command = start("Quick", "--stall-limit", "3s", plan=plan)
    os.kill(pids_in_training(tmp_path / "run", 2)[rank], signal.SIGSTOP)
    code, _, err = command.end()
    assert code == 1, err
    assert f"process {rank} of 2 does not answer: it is stopped, dead or cut off" in err
    assert f"process {1 - rank} waits in step" in err
    until(lambda: not command.members(), "the stopped process is gone too")


def test_all_stopped_for_longer_than_the_limit_is_no_standstill(start: Start, tmp_path: Path) -> None:
    command = start("Quick", "--stall-limit", "3s")
    pids = pids_in_training(tmp_path / "run", 2)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    steps = (tmp_path / "run/logs/rank-0.log").read_text().count("step in")
    waiting = Command("sleep", "6", cwd=tmp_path)
    waiting.end()
    waiting.close()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    log = tmp_path / "run/logs/rank-0.log"
    until(lambda: log.read_text().count("step in") > steps + 200, "it goes on")
    command.stop_signal()
    assert command.end()[0] == 75
    assert not list((tmp_path / "run/logs").glob("stall-*"))


def test_a_stage_that_is_killed_is_named_and_the_other_ends(start: Start, tmp_path: Path) -> None:
    command = start("Quick", plan="pipeline=2,microbatches=2")
    os.kill(pids_in_training(tmp_path / "run", 2)[1], signal.SIGKILL)
    code, _, err = command.end()
    assert code == 1, err
    assert re.search(r"process 1 of 2 .*(SIGKILL|signal 9)", err), err
    until(lambda: not command.members(), "the other stage is gone too")


def test_a_signal_to_one_stage_stops_all_at_the_same_step(start: Start, tmp_path: Path) -> None:
    command = start("Quick", plan="pipeline=2,microbatches=2")
    os.kill(pids_in_training(tmp_path / "run", 2)[1], signal.SIGTERM)
    code, _, err = command.end()
    assert (code, err) == (75, ""), err
    assert Run(tmp_path / "run").latest().step == max(line["step"] for line in Run(tmp_path / "run").records("step"))


def test_a_slow_evaluation_is_no_standstill(start: Start, tmp_path: Path) -> None:
    """Each evaluation takes longer than the limit, each of its batches less."""
    code, out, err = start("SlowEvaluation", "--stall-limit", "3s").end()
    assert (code, err) == (0, ""), err
    assert "finished, 16 steps" in out
    assert not list((tmp_path / "run/logs").glob("stall-*"))


def watchdog(folder: Path, **options) -> Watchdog:
    defaults = {"limit": None, "end": print, "phase": lambda: FORWARD, "writing": lambda: False}
    return Watchdog(folder=folder, token="a", **{**defaults, **options})


def test_the_bound_is_learned_and_generous(tmp_path: Path) -> None:
    phase = FORWARD
    dog = watchdog(tmp_path, rank=0, size=1, phase=lambda: phase)
    assert dog.bound() == 900, "the first step may compile"
    dog._seen |= {"step", "save"}
    assert dog.bound() == 60
    dog._longest = 10.0
    assert dog.bound() == 200
    phase = EVALUATION
    assert dog.bound() == 900, "the first evaluation may compile"
    phase = CHECKPOINT
    assert dog.bound() == 900


def test_a_first_step_may_compile_though_other_work_came_before(tmp_path: Path) -> None:
    phase, looks = FORWARD, 0

    def look() -> int:
        nonlocal looks
        looks += 1
        return phase

    dog = watchdog(tmp_path, rank=0, size=1, phase=look)
    dog._tick = 0.01
    dog.start(0)
    for following in (FORWARD, EVALUATION, FORWARD):
        phase = following
        until(lambda end=looks + 4: looks > end, "the watchdog has looked")
    assert dog.bound() == 900

    def steps() -> bool:
        dog.marks += 1
        return dog.bound() == 60

    until(steps, "a step was seen")
    dog.stop()


def test_work_of_several_steps_has_their_time(tmp_path: Path) -> None:
    ended: queue.Queue[str] = queue.Queue()
    dog = watchdog(tmp_path, rank=0, size=1, limit=0.2, end=lambda error: ended.put(str(error)))
    with dog.steps_at_once(10_000):
        dog.start(0)
        time.sleep(1)
        assert ended.empty()
    assert "makes no progress" in ended.get(timeout=PATIENCE_SECONDS)
    dog.stop()


def test_a_paused_terminal_holds_nobody_to_account(tmp_path: Path) -> None:
    """Process 0 writes to a terminal that was paused by Ctrl-S; once it answers no more, it is at fault."""
    ended: queue.Queue[str] = queue.Queue()
    dog = watchdog(tmp_path, rank=1, size=2, limit=0.2, end=lambda error: ended.put(str(error)))
    report = tmp_path / "stall-rank-0.txt"
    paused = dataclasses.replace(told(0), excused=True)
    report.write_text(json.dumps({"token": "a", **dataclasses.asdict(paused)}) + "\n")
    dog.start(0)
    with pytest.raises(queue.Empty):
        ended.get(timeout=2)
    report.unlink()
    assert "process 0 of 2 does not answer" in ended.get(timeout=PATIENCE_SECONDS)


def told(rank: int, *, step: int = 7, waits: bool = True) -> Standstill:
    where = f"x.py, line {rank}"
    return Standstill(
        rank=rank, host="n1", phase="step", step=step, where=where, waits=waits, excused=False, stack=("s",)
    )


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([told(0), told(1, waits=False)], "process 1 of 2 on n1 makes no progress in step 8, at x.py, line 1;"),
        ([told(0), told(1, step=6)], "process 1 of 2 on n1 makes no progress in step 7"),
        ([told(0), dataclasses.replace(told(0), rank=1)], "all 2 processes wait for each other: a message was lost"),
        ([told(0), told(1)], "in different calls: process 0 waits in step 8, at x.py, line 0; process 1 waits"),
        ([told(1)], "process 0 of 2 does not answer"),
    ],
)
def test_who_is_blamed(tmp_path: Path, found: list[Standstill], wanted: str) -> None:
    assert wanted in sentence({one.rank: one for one in found}, 2, tmp_path, 60.0)


def test_its_node_is_noted_where_others_wait_on_other_nodes() -> None:
    waiting, busy = told(0), told(1, waits=False)
    assert against_nodes({0: waiting, 1: busy}, 2) == {}, "they are on one node"
    elsewhere = dataclasses.replace(busy, host="n2")
    assert against_nodes({0: waiting, 1: elsewhere}, 2) == {"n2": "process 1 stood still in step 8, at x.py, line 1"}
    assert against_nodes({0: waiting, 1: dataclasses.replace(elsewhere, waits=True)}, 2) == {}, "a message was lost"
    assert against_nodes({0: waiting, 1: dataclasses.replace(elsewhere, step=6)}, 3) == {}, "process 2 does not answer"
    assert against_nodes({}, 2) == {}


@pytest.mark.parametrize(
    ("phase", "file", "waits"),
    [
        (COMMUNICATION, "task.py", True),
        (FORWARD, "task.py", False),
        (FORWARD, distributed_c10d.__file__, True),
        (EVALUATION, distributed_c10d.__file__, True),
        (BACKWARD, graph.__file__, True),
        (BACKWARD, str(user_line.PACKAGE / "step/any.py"), True),
        (FORWARD, str(user_line.PACKAGE / "step/any.py"), False),
        (BACKWARD, "task.py", False),
    ],
)
def test_who_waits(phase: int, file: str, waits: bool) -> None:
    stack = traceback.StackSummary.from_list([("worker.py", 1, "worker", ""), (file, 2, "f", "")])
    assert waits_in(phase, stack) is waits


def test_what_a_process_says_of_itself(tmp_path: Path) -> None:
    one = watchdog(tmp_path, rank=0, size=2, writing=lambda: True)._standstill(traceback.extract_stack())
    assert (one.excused, one.waits, one.phase) == (True, False, "step")
    dog = watchdog(tmp_path, rank=0, size=2, phase=lambda: CHECKPOINT)
    dog.waiting = True
    two = dog._standstill(traceback.extract_stack())
    assert (two.excused, two.waits, two.phase) == (False, True, "save")
