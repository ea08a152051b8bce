"""One writer a run, judged by another node from the file alone."""

import json
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from grappe.checkpoint.format import Retention, list_checkpoints
from grappe.checkpoint.lease import FILE, STALE_SECONDS, Lease
from grappe.checkpoint.saver import Saver
from grappe.errors import RunError
from grappe.launch.world import ProcessRank, World
from tests.commands import until
from tests.patience import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)


def dead_pid() -> int:
    """A process that has been."""
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return process.pid


def held(folder: Path, **changes: Any) -> None:
    """A lease of another process that lives on another node, but for the changes."""
    known = {"token": "theirs", "host": "elsewhere", "pid": 1, "job": "", "restart": 0, "beat": time.time()}
    (folder / FILE).write_text(json.dumps({**known, **changes}))


def taken(folder: Path) -> bool:
    lease = Lease(folder)
    try:
        lease.take()
    except RunError:
        return False
    lease.release()
    assert not (folder / FILE).exists()
    return True


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path) -> None:
    first = Lease(tmp_path)
    first.take()
    first.check()
    with pytest.raises(RunError, match=rf"is being written by process {os.getpid()} on "):
        Lease(tmp_path).take()
    first.check()
    first.release()
    assert taken(tmp_path)


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({}, False),
        ({"beat": -STALE_SECONDS / 2}, False),
        ({"beat": -STALE_SECONDS - 1}, True),
        ({"beat": STALE_SECONDS + 100}, True),  # a clock that was wrong must not hold a run for hours
        ({"host": None, "pid": None}, True),
        ({"host": None, "pid": 1}, False),
        ({"host": None, "pid": 10**30}, True),
        ({"host": None, "pid": 1, "beat": -STALE_SECONDS - 1}, True),
    ],
)
def test_who_lives(tmp_path, changes: dict, free: bool) -> None:
    """Here a host of None is this one, a pid of None a dead one's, a beat is counted from now."""
    changes = dict(changes)
    if "host" in changes:
        changes["host"] = socket.gethostname()
    if changes.get("pid", 1) is None:
        changes["pid"] = dead_pid()
    changes["beat"] = time.time() + changes.get("beat", 0)
    held(tmp_path, **changes)
    assert taken(tmp_path) is free


@pytest.mark.parametrize(
    ("job", "restart", "free"), [("12", "1", True), ("12", "0", False), ("13", "1", False), ("", "1", False)]
)
def test_slurm_restarts_a_job_only_when_it_is_gone(monkeypatch, tmp_path, job: str, restart: str, free) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    held(tmp_path, job="12", restart=0)
    assert taken(tmp_path) is free


def test_the_refusal_names_the_job(tmp_path) -> None:
    held(tmp_path, job="4711")
    with pytest.raises(RunError, match="process 1 on elsewhere, job 4711: stop that process first"):
        Lease(tmp_path).take()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "[" * 100_000, "{}", '{"token": 1}', '{"beat": 1e999}', "\x80\x04."]
    + [
        json.dumps({"token": "t", "host": "h", "pid": 1, "job": "", "restart": 0, "beat": 0, **lie})
        for lie in ({"pid": 1e400}, {"beat": 1e400}, {"beat": float("nan")}, {"restart": []}, {"pid": "x"})
    ],
)
def test_half_a_lease_holds_nobody_back(tmp_path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert taken(tmp_path)


def test_the_heart_beats(tmp_path) -> None:
    lease = Lease(tmp_path, beat_seconds=0.01)
    lease.take()
    first = json.loads((tmp_path / FILE).read_text())["beat"]
    until(lambda: json.loads((tmp_path / FILE).read_text())["beat"] > first, "the heart beats")
    lease.release()


def test_a_lease_that_was_taken_is_not_given_back(tmp_path) -> None:
    lease = Lease(tmp_path)
    lease.take()
    held(tmp_path)
    with pytest.raises(RunError, match="process 1 on elsewhere writes"):
        lease.check()
    lease.release()
    assert json.loads((tmp_path / FILE).read_text())["token"] == "theirs"


def test_a_taken_lease_stops_the_next_commit(tmp_path) -> None:
    (tmp_path / "checkpoints").mkdir()
    lease = Lease(tmp_path)
    lease.take()
    world = World(process=ProcessRank(), device=torch.device("cpu"))
    saver = Saver(tmp_path / "checkpoints", world, lease.token, Retention(), lease.check)
    saver.save(1, {"model.w": torch.ones(2)}, {}, {})
    assert saver.wait() is None
    held(tmp_path)
    saver.save(2, {"model.w": torch.ones(2)}, {}, {})
    assert "this process writes nothing more" in (saver.wait() or "")
    assert [one.step for one in list_checkpoints(tmp_path / "checkpoints")] == [1]
    lease.release()


def _contend(folder: Path, start: Any, answers: Any) -> None:
    lease = Lease(folder)
    start.wait()
    try:
        lease.take()
        took = True
    except RunError:
        took = False
    start.wait()  # a slow one may have taken it over from a fast one: it is known by now who has it
    try:
        lease.check()
    except RunError:
        took = False
    answers.put(took)
    start.wait()  # until then all live


def test_of_several_at_once_one_gets_it(tmp_path) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(4), context.Queue()
    contenders = [context.Process(target=_contend, args=(tmp_path, start, answers)) for _ in range(4)]
    for process in contenders:
        process.start()
    told = [answers.get(timeout=PATIENCE_SECONDS) for _ in contenders]
    for process in contenders:
        process.join()
    assert sum(told) == 1
