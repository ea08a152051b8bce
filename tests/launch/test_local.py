"""Processes on this machine: started, watched, interrupted, killed; nothing of them may remain."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grappe.errors import DataError, GrappeError, ProcessDied, UsageError
from grappe.launch import local
from grappe.launch.child import Report
from grappe.launch.local import explanation, hint, lost_another
from grappe.launch.signals import handled
from grappe.profiling import memory
from grappe.profiling.memory import ControlGroup
from grappe.training.run import Run
from grappe.words import host_name
from tests.commands import GRAPPE, SLOW, Command, pids_in_training, until

PLAN = ("--plan", "replicate=2,threads=1,device=cpu,workers=1")
HOST = host_name()
Start = Callable[..., Command]


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of our own, to see that nothing is left in it."""
    local.start_server()  # whose socket stays for the next launch
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def gone(command: Command) -> None:
    """Nothing of the command lives or lies about any more."""
    until(lambda: not command.members(), "all its processes have ended")
    assert not command.left()


def test_values_come_back(temp: Path) -> None:
    assert local.local("tests.launched:answer", {"a": 1}, 2) == ({"a": 1}, 0, 2, True)
    assert not list(temp.iterdir())
    assert local.local("tests.launched:large", 3_000_000, 2) == bytes(3_000_000)
    numbers, ones = local.local("tests.launched:tensors", 100_000, 2)
    assert torch.equal(numbers, torch.arange(100_000))
    assert torch.equal(ones, torch.ones(100_000))


def test_todays_environment_reaches_processes_of_a_server_that_was_started_before(monkeypatch):
    local.local("tests.launched:answer", None, 1)
    monkeypatch.setenv("GRAPPE_TEST_VARIABLE", "new")
    assert local.local("tests.launched:variable", "GRAPPE_TEST_VARIABLE", 1) == "new"
    monkeypatch.delenv("GRAPPE_TEST_VARIABLE")
    assert local.local("tests.launched:variable", "GRAPPE_TEST_VARIABLE", 1) is None


def test_a_temporary_folder_that_is_too_long_for_sockets_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(folder := tmp_path / ("x" * 80)))
    local._check_temporary_folder()  # it is not there: Python takes another
    folder.mkdir()
    with pytest.raises(UsageError, match=r"TMPDIR=.*xx: sockets of processes cannot have so long a name"):
        local._check_temporary_folder()


def test_works_in_a_thread() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(local.local("tests.launched:answer", 5, 1)))
    thread.start()
    thread.join()
    assert found == [(5, 0, 1, True)]


def test_an_error_of_ours_comes_back_as_itself(temp: Path) -> None:
    with pytest.raises(DataError, match=r"^a file is missing$") as caught:
        local.local("tests.launched:refuse", None, 2)
    assert "launched.py" in caught.value.details
    assert not list(temp.iterdir())


def test_an_exception_inside_torch_is_named_with_its_process_and_last_lines() -> None:
    with pytest.raises(ProcessDied) as caught:
        local.local("tests.launched:fail_in_torch", None, 3)
    message = str(caught.value)
    assert message.startswith(f"process 1 of 3 on {HOST} failed with RuntimeError\n")
    assert "\n  | hello from 1\n" in message
    assert "inconsistent tensor size" in message
    assert "my peer has gone" not in message


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_process_is_named_and_not_its_peers(number: signal.Signals) -> None:
    with pytest.raises(ProcessDied) as caught:
        local.local("tests.launched:die", int(number), 2)
    message = str(caught.value)
    assert message.startswith(f"process 1 of 2 on {HOST} was killed by {number.name}")
    assert message.endswith("\n  | hello from 1")
    own = "launched.py, line" in message and ", in die(): os.kill(os.getpid(), number))\n" in message
    assert own == (number == signal.SIGSEGV)  # which Python can still name


def test_a_kill_is_survived_as_often_as_asked_and_an_error_never(temp: Path, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(ProcessDied, match="was killed by SIGKILL"):
        local.local("tests.launched:die", int(signal.SIGKILL), 2, restarts=2)
    said = capfd.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in said] == [
        f"starting again from the last checkpoint ({left} times left)" for left in (1, 0)
    ]
    for function, number in (("refuse", None), ("fail_in_torch", None), ("die", int(signal.SIGSEGV))):
        with pytest.raises(GrappeError):
            local.local(f"tests.launched:{function}", number, 2, restarts=2)
        assert "starting again" not in capfd.readouterr().err
    assert not list(temp.iterdir())


def test_a_crash_outside_the_users_files_shows_where(tmp_path: Path) -> None:
    crash = "import os; os.kill(os.getpid(), 11)"
    with (tmp_path / "rank-0.log").open("w") as log:
        subprocess.run([sys.executable, "-X", "faulthandler", "-c", crash], stderr=log, check=False)
    words = local.last_lines(tmp_path / "rank-0.log")
    assert words == '\n  | Fatal Python error: Segmentation fault\n  |   File "<string>", line 1 in <module>'


LOADED_BY_HAND = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("by_hand", sys.argv[1])
module = sys.modules["by_hand"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from grappe.launch import local
if __name__ == "__main__":
    print(local.local("tests.launched:answer", module.Given(), 2)[0].text())
"""


def test_a_class_of_a_module_that_was_loaded_by_hand_reaches_the_processes(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.py"
    file.write_text("WORD = 'by value'\nclass Given:\n    def text(self):\n        return WORD\n")
    (tmp_path / "script.py").write_text(LOADED_BY_HAND)
    words = [sys.executable, str(tmp_path / "script.py"), str(file)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "by value", done.stderr


def test_a_process_that_leaves_without_a_word_is_named() -> None:
    with pytest.raises(ProcessDied, match=r"^process 0 of 1 .* ended by itself with exit code 0"):
        local.local("tests.launched:vanish", None, 1)


def test_a_signal_that_comes_before_the_processes_are_there_reaches_them() -> None:
    timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    assert local.local("tests.launched:wait_for_a_signal", None, 1, saves=True) == signal.SIGUSR1


def test_a_closed_terminal_counts_but_not_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in handled()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in handled()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_ends_processes_that_have_nothing_to_save(temp: Path) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        local.local("tests.launched:refuse", None, 1)
    assert not list(temp.iterdir())


class SignalWhenCollected:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_ends_them_where_python_drops_the_exception(temp: Path) -> None:
    """As it does in a finalizer or a weak reference's callback, of which a training's start has many."""
    with pytest.raises(KeyboardInterrupt):
        local.local("tests.launched:refuse", None, 1, meanwhile=SignalWhenCollected)
    assert not list(temp.iterdir())


def test_a_killed_process_ends_the_training(start: Start, tmp_path: Path) -> None:
    shared = set(Path("/dev/shm").iterdir())
    command = start(GRAPPE, "train", SLOW, "--run", "run", *PLAN)
    victim = pids_in_training(tmp_path / "run", 2)[1]
    os.kill(victim, signal.SIGKILL)
    code, _, err = command.end()
    assert code == 1
    assert err.startswith(f"grappe: process 1 of 2 on {HOST} was killed by SIGKILL")
    assert err.endswith(f"\n  | step in {victim}\n")
    assert "Traceback" not in err
    gone(command)
    # Other tests have some there for a moment.
    until(lambda: set(Path("/dev/shm").iterdir()) <= shared, "its shared memory is given back")


def test_a_killed_process_starts_the_training_again_in_the_same_command(start: Start, tmp_path: Path) -> None:
    words = ("epochs=3", "--run", "run", *PLAN, "--save-every", "2", "--restarts", "1")
    command = start(GRAPPE, "train", SLOW, *words)
    victim = pids_in_training(tmp_path / "run", 2)[1]
    os.kill(victim, signal.SIGKILL)
    code, _, err = command.end()
    said = [line for line in err.splitlines() if line.startswith("grappe: ")]
    assert code == 0 and len(said) == 1, err
    assert said[0].startswith(f"grappe: process 1 of 2 on {HOST} was killed by SIGKILL")
    run = Run(tmp_path / "run")
    assert run.is_finished() and run.read_description()["restarts"] == 1
    assert [record["step"] for record in run.records("step")] == list(range(1, 25))
    gone(command)


def test_in_a_job_a_kill_has_the_exit_code_that_the_script_goes_on_after(start: Start, tmp_path: Path) -> None:
    command = start(GRAPPE, "train", SLOW, "--run", "run", GRAPPE_FAILURE=str(tmp_path / "job-5.failed"))
    os.kill(pids_in_training(tmp_path / "run", 1)[0], signal.SIGKILL)
    code, _, _ = command.end()
    assert code == 137 and json.loads((tmp_path / "job-5.why").read_text())["killed"]
    assert not (tmp_path / "job-5.failed").exists()


def test_ctrl_c_saves_and_the_run_goes_on(start: Start, tmp_path: Path) -> None:
    command = start(GRAPPE, "train", SLOW, "--run", "run", *PLAN)
    pids_in_training(tmp_path / "run", 2)
    command.stop_signal()
    code, out, err = command.end()
    assert (code, err) == (75, "")
    assert "interrupted, saved" in out
    gone(command)
    run = Run(tmp_path / "run")
    saved = run.latest()
    assert 0 < saved.step < 800
    assert not run.is_finished()

    code, out, err = start(GRAPPE, "train", SLOW, "pause=0", "epochs=8", "--run", "run", *PLAN).end()
    assert (code, err) == (0, "")
    assert "finished, 64 steps" in out
    assert [one["step"] for one in run.records("step")] == list(range(1, 65))

    code, out, err = start(GRAPPE, "train", SLOW, "--run", "run", *PLAN).end()
    assert (code, out, err) == (0, "run is finished (step 64): nothing to do; --from run trains on from it\n", "")


def test_a_second_ctrl_c_ends_at_once(start: Start, tmp_path: Path) -> None:
    command = start(GRAPPE, "train", SLOW, "pause=0.5", "--run", "run", *PLAN)
    pids_in_training(tmp_path / "run", 2)
    command.stop_signal()
    until(lambda: not command.has_pending(signal.SIGINT), "it has noticed")
    time.sleep(0.1)  # Python, as the kernel, makes one of two that come together
    command.stop_signal()
    code, _, err = command.end()
    assert code == 130
    assert err == "grappe: ended at once; earlier checkpoints are kept\n"
    gone(command)


def test_sigterm_to_the_parent_alone_saves(start: Start, tmp_path: Path) -> None:
    command = start(GRAPPE, "train", SLOW, "--run", "run", *PLAN)
    pids_in_training(tmp_path / "run", 2)
    os.kill(command.process.pid, signal.SIGTERM)
    code, out, err = command.end()
    assert (code, err) == (75, "")
    assert "interrupted, saved" in out
    assert Run(tmp_path / "run").latest().step > 0
    gone(command)


def test_two_trainings_at_once_do_not_meet(start: Start, tmp_path: Path) -> None:
    options = ("epochs=2", "pause=0", *PLAN)
    both = [start(GRAPPE, "train", SLOW, "--run", name, *options) for name in ("a", "b")]
    assert [one.end()[0] for one in both] == [0, 0]
    a, b = ([one["loss"] for one in Run(tmp_path / name).records("step")] for name in ("a", "b"))
    assert len(a) == 16
    assert a == b


SCRIPT = """
import grappe
import torch
from pathlib import Path
from torch import nn

with open("runs-of-the-script", "a") as log:
    log.write("once\\n")

class Mine(grappe.Task):
    width: int = 3

    def model(self):
        return nn.Linear(self.width, 2)

    def data(self, split, folder):
        return grappe.Arrays(torch.arange(96.0).view(32, 3) / 96, torch.arange(32) % 2)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)

run = grappe.train(Mine(epochs=1, batch_size=8), "replicate=2,threads=1,device=cpu", "run")
print("trained", run.latest().step)
print("weights", grappe.load(run, Mine()).weight.shape[1])
print("evaluated", grappe.evaluate(run, plan="threads=1,device=cpu").samples)
"""


@pytest.mark.parametrize("way", ["file", "prompt"])
def test_a_script_without_a_guard_and_its_own_class(start: Start, tmp_path: Path, way: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    if way == "file":
        command = start(sys.executable, "script.py")
    else:  # what a notebook does: statements one by one, in a __main__ that is no file
        command = start(sys.executable, "-i", "-q", text="exec(open('script.py').read())\n")
    code, out, err = command.end()
    assert (code, err.replace(">>> ", "").strip()) == (0, "")
    assert out.endswith("trained 4\nweights 3\nevaluated 32\n")
    assert (tmp_path / "runs-of-the-script").read_text() == "once\n"
    gone(command)


PEER = "Connection closed by peer [127.0.0.1]:5000"


def failed(rank: int, exit_code: int = 1, why: str = "", **report: Any) -> Any:
    return SimpleNamespace(
        name=f"process {rank} of 2", exit_code=exit_code, why=why, report=Report(**report), log=Path("none")
    )


def test_of_several_the_one_that_failed_by_itself_is_named() -> None:
    one = failed(0, kind="error", error="RunError", message="later", when=2.0)
    other = failed(1, kind="error", error="RunError", message="first", when=1.0)
    assert str(explanation([one, other])) == "first"
    lost = failed(1, kind="error", error="ProcessDied", message=f"no proof: {PEER}", when=1.0)
    refused = failed(0, kind="error", error="UsageError", message="no thread", when=2.0)
    assert str(explanation([lost, refused])) == "no thread"
    lost = failed(1, kind="crashed", error="RuntimeError", message=PEER, when=1.0)
    crashed = failed(0, kind="crashed", error="ZeroDivisionError", message="division by zero", when=2.0)
    assert str(explanation([lost, crashed])).startswith("process 0 of 2 failed with ZeroDivisionError")
    assert str(explanation([lost])).startswith("process 1 of 2 failed with RuntimeError")
    assert lost_another("Horovod has been shut down. This was caused by an exception on one of the ranks")
    lost = failed(1, kind="crashed", error="RuntimeError", message=PEER, when=1.0)
    killed = failed(0, exit_code=-signal.SIGKILL, kind="silent", when=2.0)
    assert str(explanation([lost, killed])).startswith("process 0 of 2 was killed by SIGKILL")


@pytest.mark.parametrize("code", [1, -signal.SIGSEGV, -signal.SIGABRT])
def test_a_silent_end_where_memory_is_limited_names_the_limit(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    assert hint(code) == ""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**9 if kind == resource.RLIMIT_DATA else -1, -1))
    assert "no more memory, and it is limited here: see `ulimit -d`" in hint(code)
    silent = failed(0, exit_code=code, kind="silent", why=hint(code))
    assert "`ulimit -d`" in str(explanation([silent]))
    crashed = failed(0, kind="crashed", exit_code=1, error="ZeroDivisionError", why=hint(1))
    assert "ulimit" not in str(explanation([crashed]))


def test_a_kill_at_the_limit_of_a_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ControlGroup(size=4_000_000_000, free=0)
    monkeypatch.setattr(memory, "control_group", lambda: group)
    monkeypatch.setattr(memory, "killed", lambda: 2)
    assert "this job or container may have 4.0 GB of memory together" in hint(-signal.SIGKILL, 1)
    for before in (2, None):  # somebody else killed it
        assert "see `dmesg`" in hint(-signal.SIGKILL, before)
    assert hint(-signal.SIGTERM, 1) == ""
