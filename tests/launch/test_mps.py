"""MPS with a stand-in for its program: the exact commands and environment, and nothing left behind."""

import json
import os
from pathlib import Path

import pytest

from grappe.errors import PlanError, UsageError
from grappe.launch import mps
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan

STAND_IN = """#!{python}
import json, os, sys
with open({record!r}, "a") as stream:
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES")
    named = {{name: os.environ.get(name) for name in names}}
    word = sys.stdin.read() if sys.argv[1:] == [] else ""
    stream.write(json.dumps([sys.argv[1:], word, named]) + "\\n")
sys.exit({code})
"""
SHARED = Plan.parse("replicate=8,per_device=8,device=cuda")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path, monkeypatch)
    return tmp_path / "record"


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "grappe" / f"mps-{os.uname().nodename}"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
    import sys

    program = folder / "bin" / mps.PROGRAM
    program.parent.mkdir(exist_ok=True)
    program.write_text(STAND_IN.format(python=sys.executable, record=str(folder / "record"), code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)


def told(record: Path) -> list:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def test_started_and_ended_in_private_folders(record: Path, base: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "2,3"}
    with mps.shared_gpus(SHARED, None, environment):
        pipe, log = environment["CUDA_MPS_PIPE_DIRECTORY"], environment["CUDA_MPS_LOG_DIRECTORY"]
        assert "CUDA_VISIBLE_DEVICES" not in environment  # the daemon numbers its devices from 0
        for folder in (pipe, log):
            assert Path(folder).stat().st_mode & 0o777 == 0o700
            assert Path(folder).is_relative_to(base)
    assert environment == {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "2,3"}  # a notebook goes on
    folders = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": log}
    first, last = told(record)
    assert first == [["-d"], "", {**folders, "CUDA_VISIBLE_DEVICES": "2,3"}]
    assert last[:2] == [[], "quit\n"]
    assert {name: last[2][name] for name in folders} == folders
    assert not list(base.iterdir())


def test_ended_when_training_fails(record: Path) -> None:
    with pytest.raises(ZeroDivisionError), mps.shared_gpus(SHARED, None, {**os.environ}):
        raise ZeroDivisionError
    assert [words for _, words, _ in told(record)] == ["", "quit\n"]


def test_the_first_process_of_a_node_starts_it_for_the_others(record: Path) -> None:
    step = {"size": 2, "local_size": 2, "launcher": "srun", "job": "7-0-0"}
    places = [ProcessRank(rank=rank, local_rank=rank, **step) for rank in range(2)]
    first, second = {**os.environ}, {**os.environ}
    with mps.shared_gpus(SHARED, places[0], first), mps.shared_gpus(SHARED, places[1], second):
        assert first["CUDA_MPS_PIPE_DIRECTORY"] == second["CUDA_MPS_PIPE_DIRECTORY"]
        assert first["CUDA_MPS_PIPE_DIRECTORY"].endswith("7-0-0-1/pipe")
    assert [words for _, words, _ in told(record)] == ["", "quit\n"]
    with mps.shared_gpus(SHARED, places[0], first):  # they train once more
        assert first["CUDA_MPS_PIPE_DIRECTORY"].endswith("7-0-0-2/pipe")


def test_a_killed_owners_daemon_is_ended_by_the_next(record: Path, base: Path) -> None:
    orphan = base / "dead"
    mps.start(orphan, {**os.environ})
    (orphan / mps.OWNER).write_text("999999999")
    with mps.shared_gpus(SHARED, None, {**os.environ}):
        assert not orphan.exists()
    assert [words for _, words, _ in told(record)] == ["", "quit\n", "", "quit\n"]
    assert told(record)[1][2]["CUDA_MPS_PIPE_DIRECTORY"] == str(orphan / "pipe")


@pytest.mark.parametrize("plan", ["replicate=8", "replicate=8,per_device=8,device=cpu", "replicate=8,per_device=8"])
def test_plans_that_share_no_gpu_here_start_nothing(record: Path, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if plan.endswith("per_device=8") and list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU, so that the plan shares it")
    environment: dict[str, str] = {}
    with mps.shared_gpus(Plan.parse(plan), None, environment):
        assert environment == {}
    assert told(record) == []


def test_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, code=1)
    with pytest.raises(UsageError, match="MPS does not start"), mps.shared_gpus(SHARED, None, {**os.environ}):
        pass
    many = Plan.parse("replicate=64,per_device=64,device=cuda")
    with pytest.raises(PlanError, match="48 processes a GPU"), mps.shared_gpus(many, None, {}):
        pass


def test_without_a_folder_of_ones_own_it_is_refused(record, tmp_path, monkeypatch):
    (tmp_path / "grappe").mkdir(mode=0o777)
    (tmp_path / "grappe").chmod(0o777)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    refused = pytest.raises(UsageError, match="needs a folder that only you can write in")
    with refused, mps.shared_gpus(SHARED, None, {**os.environ}):
        pass
    assert told(record) == []
