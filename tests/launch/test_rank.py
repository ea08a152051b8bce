"""Processes that torchrun and srun start: one voice, the right exit codes, no address fixed in advance."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grappe.training.run import Run
from tests.commands import GRAPPE, SLOW, Command, until

PLAN = ("--plan", "replicate=2,threads=1,device=cpu")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
Variables = Callable[[int], dict[str, str]]
Start = Callable[..., list[Command]]


def one_node(rank: int) -> dict[str, str]:
    """Returns srun's variables for one of two processes."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    return {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}


def two_nodes(rank: int) -> dict[str, str]:
    """The same on two nodes of one process each; both are this machine."""
    own = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}
    return {**one_node(rank), **own}


@pytest.fixture
def start(start: Callable[..., Command], tmp_path: Path) -> Start:
    """Starts a command as the two processes that a launcher describes."""

    def begin(launcher: Variables, *arguments: str) -> list[Command]:
        return [start(GRAPPE, *arguments, **launcher(rank), TMPDIR=str(tmp_path)) for rank in range(2)]

    return begin


@pytest.mark.parametrize("launcher", [one_node, two_nodes])
def test_srun_trains_with_one_voice(start: Start, tmp_path: Path, launcher: Variables) -> None:
    first, second = start(launcher, "train", SLOW, "epochs=1", "pause=0", "--run", "run", *PLAN)
    code, out, err = first.end()
    assert (code, err) == (0, "")
    assert out.count("slow on 2 processes") == out.count("finished, 8 steps") == 1
    code, out, err = second.end()
    assert (code, out.replace("\n", "").replace(f"step in {second.process.pid}", ""), err) == (0, "", "")
    assert Run(tmp_path / "run").is_finished()
    assert not list(tmp_path.rglob("rendezvous-*"))


def test_what_processes_find_wrong_together_is_said_once(start: Start) -> None:
    ends = [one.end() for one in start(one_node, "train", "digits", "epocs=3", *PLAN)]
    assert [(code, out) for code, out, _ in ends] == [(2, "")] * 2
    said = "".join(err for _, _, err in ends)
    assert said.count("\n") == 1
    assert said.endswith("task Digits has no 'epocs': did you mean epochs?\n")


def test_an_interrupted_training_ends_with_75_and_the_others_before_it(start: Start, tmp_path: Path) -> None:
    first, second = start(one_node, "train", SLOW, "--run", "run", *PLAN)
    curves = tmp_path / "run" / "metrics.jsonl"
    until(lambda: curves.exists() and "evaluation" in curves.read_text(), "it trains")
    for one in (first, second):
        os.kill(one.process.pid, signal.SIGUSR2)
    assert second.process.wait() == 0
    assert first.process.poll() is None
    code, out, err = first.end()
    assert (code, err) == (75, "")
    assert "interrupted, saved" in out


def test_torchrun_may_train_twice_in_the_same_processes(tmp_path: Path) -> None:
    words = ("--standalone", "--nproc-per-node", "2", "-m", "grappe", "train", SLOW, "pause=0", "--smoke", *PLAN)
    with contextlib.closing(Command(TORCHRUN, *words, cwd=tmp_path)) as command:
        code, out, err = command.end()
    assert code == 0, err
    assert out.count("slow on 2 processes") == 2
    assert out.count("smoke: step, evaluation, save and resume work") == 1
