"""Processes end with what started them, stopped or busy as they may be; a kill while they start is told as others."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import grappe
from grappe.cli.exit import BUG
from grappe.errors import ProcessDied, UsageError
from grappe.launch import rendezvous
from grappe.launch.rank import ProcessRank
from grappe.training.run import Run
from tests.commands import GRAPPE, SLOW, TORCHRUN, Command, pids_in_training, send, until

PLAN = ("--plan", "replicate=2,threads=1,device=cpu,workers=1")
O_ASYNC = 0o20000
Start = Callable[..., Command]


@pytest.fixture
def start(start: Start) -> Start:
    return lambda *arguments: start(GRAPPE, "train", SLOW, *arguments, cold=True)


def line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def servers(command: Command) -> list[int]:
    """The server that processes are forked from; those that it has forked have its command line, too."""
    found = [pid for pid in command.members() if "forkserver import main" in line(pid)]
    return [pid for pid in found if parent(pid) == command.process.pid]


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def signalling_pipes(pid: int) -> int:
    """Counts the pipes whose closed other end makes the kernel signal the process; those that it inherited, too."""
    try:
        texts = [one.read_text() for one in Path(f"/proc/{pid}/fdinfo").iterdir()]
    except OSError:
        return 0
    flags = [int(row.split()[1], 8) for text in texts for row in text.splitlines() if row.startswith("flags:")]
    return sum(bool(one & O_ASYNC) for one in flags)


def is_guarded(pid: int) -> bool:
    """Whether the kernel signals the process when the other end of one of its pipes is closed."""
    return signalling_pipes(pid) > 0


def data_workers(command: Command, ranks: list[int]) -> list[int]:
    """Those that have begun: between its fork and its first lines a process knows of no parent yet."""
    children = [pid for pid in command.members() if parent(pid) in ranks]
    return [pid for pid in children if signalling_pipes(pid) > signalling_pipes(parent(pid))]


def freeze_and_kill(command: Command) -> None:
    """The others get no turn any more, as on a machine that is loaded without end; then the command is killed."""
    # Python's resource tracker does no work, and only waits for the end of the others.
    working = [pid for pid in command.members() if "resource_tracker" not in line(pid)]
    send([pid for pid in working if pid != command.process.pid], signal.SIGSTOP)
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait()


@pytest.mark.parametrize("processes", [1, 2])
def test_what_never_gets_a_turn_ends_with_its_command(start: Start, tmp_path: Path, processes: int) -> None:
    plan = PLAN if processes == 2 else ("--plan", "threads=1,device=cpu,workers=1")
    command = start("--run", "run", *plan)
    ranks = pids_in_training(tmp_path / "run", processes)
    until(lambda: len(data_workers(command, ranks)) >= processes, "its data workers have begun")
    freeze_and_kill(command)
    until(lambda: not command.members(), "all have ended")


def test_a_server_that_still_imports_ends_with_its_command(start: Start) -> None:
    command = start("--run", "run", *PLAN)
    until(lambda: any(map(is_guarded, servers(command))), "the server has begun")
    freeze_and_kill(command)
    until(lambda: [line(pid) for pid in command.members() if "forkserver" in line(pid)] == [], "it has ended")


def early_log(command: Command) -> bool:
    return bool(list(command.temp.glob("grappe-*/rank-0.log")))


@pytest.mark.parametrize(
    "moment",
    [
        servers,
        lambda command: any(map(is_guarded, servers(command))),
        early_log,
        lambda command: len([pid for pid in command.members() if parent(pid) in servers(command)]) == 2,
    ],
    ids=["server", "guarded", "first", "both"],
)
def test_a_server_killed_while_processes_start_is_named(start: Start, moment: Callable[[Command], object]) -> None:
    command = start("--run", "run", "--steps", "2", "pause=0", *PLAN)
    until(lambda: moment(command), "they start")
    send(servers(command), signal.SIGKILL)
    code, _, error = command.end()
    assert BUG not in error
    assert "Traceback" not in error
    if code:  # else another server was started in its place
        assert code == 1, error
        assert "was killed by SIGKILL" in error
        assert "process " in error
    until(lambda: not command.members(), "all have ended")


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_process_killed_while_it_starts_is_named(start: Start, wanted: int) -> None:
    command = start("--run", "run", *PLAN)

    def young() -> list[int]:
        return [pid for pid in command.members() if parent(pid) in servers(command)]

    until(lambda: len(young()) >= wanted, "they start")
    os.kill(young()[-1], signal.SIGKILL)
    code, _, error = command.end()
    assert code == 1
    assert "was killed by SIGKILL" in error, error
    assert BUG not in error


def test_a_child_whose_parent_has_ended_begins_nothing(tmp_path: Path) -> None:
    """A process made by os.fork that is scheduled only when its parent is gone."""
    text = """
import os, signal, sys
from grappe.launch import fork

def late(parent):
    os.kill(os.getpid(), signal.SIGSTOP)  # as if another process had its turn
    real(parent)

real, fork.end_with_forking_parent = fork.end_with_forking_parent, late
fork.run_in_fork(lambda: open(sys.argv[1], "w").close())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(grappe.__file__).parents[1])}
    mark = tmp_path / "begun"
    parent_process = subprocess.Popen([sys.executable, "-c", text, str(mark)], env=environment)

    def children() -> list[int]:
        task = Path(f"/proc/{parent_process.pid}/task/{parent_process.pid}/children")
        return [int(pid) for pid in task.read_text().split()]

    def stopped(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    until(lambda: children() and stopped(children()[0]), "the child waits")
    (child,) = children()
    parent_process.kill()
    parent_process.wait()
    os.kill(child, signal.SIGCONT)
    until(lambda: not Path(f"/proc/{child}/cmdline").exists() or not line(child), "the child has ended")
    assert not mark.exists()


def test_processes_of_torchrun_end_with_it(tmp_path: Path) -> None:
    starter = (TORCHRUN, "--standalone", "--nproc-per-node", "2", "--no-python")

    def trains() -> bool:
        assert command.process.poll() is None
        return any(any(Run(one.parent).records("step")) for one in tmp_path.glob("runs/*/run.json"))

    with contextlib.closing(Command(*starter, GRAPPE, "train", SLOW, *PLAN, cwd=tmp_path, cold=True)) as command:
        until(trains, "they train")
        command.process.kill()
        until(lambda: not command.members(), "all have ended")


def test_a_process_whose_torchrun_has_ended_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is still importing when torchrun is killed would ask for torchrun's store for half an hour."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    process = ProcessRank(rank=0, size=2, local_size=2, launcher="torchrun")
    with pytest.raises(ProcessDied, match=f"torchrun, which serves .*:{port}, has ended"):
        rendezvous.start(process, "gloo", torch.device("cpu"), Path())


def test_a_port_that_another_program_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": "0",
            "WORLD_SIZE": "2",
        }.items():
            monkeypatch.setenv(name, value)
        process = ProcessRank(rank=0, size=2, local_size=2, launcher="torchrun")
        with pytest.raises(UsageError, match=f"MASTER_PORT={port}: another program of .* has this port"):
            rendezvous.start(process, "gloo", torch.device("cpu"), Path())


def test_a_process_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place[10:], "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(rendezvous, "PATIENCE", timedelta(seconds=1))
    process = ProcessRank(rank=1, size=2, local_size=1, launcher="torchrun")
    with pytest.raises(UsageError, match=f"process 1 of 2 waited 120 s for the others at {place}: start WORLD_SIZE=2"):
        rendezvous.start(process, "gloo", torch.device("cpu"), Path())
    assert capfd.readouterr().err == f"grappe: process 1 of 2 waits for the others at {place}\n"
