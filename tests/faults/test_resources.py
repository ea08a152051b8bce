"""Scarce or odd resources: a training ends well, or with one message, and nothing that was saved is lost."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grappe import sites
from grappe.checkpoint.lease import Lease
from grappe.cli.exit import BUG
from grappe.errors import RunError
from grappe.training.run import Run
from tests.commands import SLOW, Command, pids_in_training, until

TRAIN = (sys.executable, "-m", "grappe", "train", "digits", "--steps", "2")
ONE, TWO = ("--plan", "threads=1,device=cpu"), ("--plan", "replicate=2,threads=1,device=cpu")
Ended = tuple[int, str, str]


@pytest.fixture
def run(start: Callable[..., Command]) -> Callable[..., Ended]:
    """Runs a program to its end in an empty folder; exit code, output, errors. Nothing is left of it."""

    def ended(*words: str, **variables: str) -> Ended:
        command = start(*words, **variables)
        result = command.end()
        until(lambda: not command.members(), "all of its processes have ended")
        assert command.left() == []
        return result

    return ended


def is_whole(folder: Path) -> bool:
    newest = Run(folder).latest()
    return newest is not None and newest.step == 2


FEW_FILES = """
import resource, sys
from grappe.cli.commands import main
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.exit(main())
"""


def test_few_open_files(run, tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text(FEW_FILES)
    code, _, err = run(sys.executable, "few.py", *TRAIN[3:], "--run", "run", *TWO)
    assert code == 0, err
    assert is_whole(tmp_path / "run")


def in_small_shared_memory(run: Callable[..., Ended], size: str, *words: str) -> Ended:
    """Runs a program where /dev/shm is small, as in a container."""
    mounted = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    own = ("unshare", "--mount", "--map-root-user", "bash", "-c")
    if run(*own, mounted)[0]:
        pytest.skip("no mounts of one's own")
    return run(*own, mounted + ' && exec "$@"', "bash", *words)


def test_little_shared_memory(run, tmp_path: Path) -> None:
    code, _, err = in_small_shared_memory(run, "64k", *TRAIN, "--run", "run", *TWO)
    assert code == 0, err
    assert is_whole(tmp_path / "run")


WORKERS = """'''Samples that data workers hand over.'''

from torch.utils.data import Dataset

from grappe.tasks.digits import Digits


class Rows(Dataset):
    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays.targets)

    def __getitem__(self, index):
        return self.arrays.inputs[index].float() / 16, self.arrays.targets[index]


class Loaded(Digits):
    def data(self, split, folder):
        return Rows(super().data(split, folder))
"""


@pytest.mark.parametrize("size", ["8k", "64k"])  # no room for a semaphore; no room for a batch
def test_no_shared_memory_for_data_workers(run, tmp_path: Path, size: str) -> None:
    (tmp_path / "loaded.py").write_text(WORKERS)
    train = (sys.executable, "-m", "grappe", "train", "loaded.py", "--steps", "2", "--run", "run")
    plan = ("--plan", "threads=1,device=cpu,workers=1")
    code, _, err = in_small_shared_memory(run, size, *train, *plan)
    assert code == 2, err
    assert "/dev/shm is full" in err and "workers=0" in err
    assert "Traceback" not in err and BUG not in err


def test_little_address_space(run, tmp_path: Path) -> None:
    """Less than torch needs: one message, and no folder that looks like a run."""
    code, _, err = run("bash", "-c", 'ulimit -v 500000; exec "$@"', "bash", *TRAIN, "--run", "run", *ONE)
    assert code in (1, 2), err
    assert BUG not in err
    assert not (tmp_path / "run/checkpoints/step-000001").exists()


def few_processes(limit: int) -> tuple[str, ...]:
    """Words before a command that may have so many processes and threads, itself included."""
    limited = ("bash", "-c", f'ulimit -u {limit}; exec "$@"', "bash")
    if os.geteuid():
        mine = [one for one in Path("/proc").glob("[0-9]*/task/*") if one.stat().st_uid == os.geteuid()]
        return (limited[0], limited[1], limited[2].replace(str(limit), str(limit + len(mine))), limited[3])
    # The limit is not for root; another user still has to read root's files here.
    other = ("setpriv", "--reuid=54321", "--inh-caps=-all,+dac_override", "--ambient-caps=+dac_override")
    return (*other, *limited)


@pytest.mark.parametrize("limit", [1, 3, 9])
def test_few_processes(run, tmp_path: Path, limit: int) -> None:
    """One message where the system starts no further process or thread; nothing is in the way of the next start."""
    code, _, err = run(*few_processes(limit), *TRAIN, "--run", "run", *TWO)
    assert code in (1, 2), err
    assert f"starts no further process or thread: this user may have {limit} (ulimit -u)" in err
    assert BUG not in err
    assert "Traceback" not in err
    if limit == 9:
        code, _, err = run(*TRAIN, "--run", "run", *TWO)
        assert code == 0, err
        assert is_whole(tmp_path / "run")


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"HOME": "/proc/nowhere", "XDG_CONFIG_HOME": "", "TERM": ""}, id="none"),
        pytest.param({"HOME": "", "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, id="C"),
    ],
)
def test_odd_environments_and_a_name_that_is_no_text(run, tmp_path: Path, variables: dict[str, str]) -> None:
    name = os.fsdecode(b"run\xff\xe9\x1b[2J")
    code, out, err = run(*TRAIN, "--run", name, *ONE, **variables)
    assert code == 0, err
    assert "\x1b" not in out + err
    assert is_whole(tmp_path / name)
    code, out, err = run(sys.executable, "-m", "grappe", "runs", name, **variables)
    assert code == 0, err
    assert r"run\udcff\udce9\x1b[2J" in out


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)  # what Python says where /etc/passwd lacks the user
    assert not sites.own_folder({}).is_dir()
    assert not sites.own_folder({"XDG_CONFIG_HOME": "relative"}).is_dir()


@pytest.mark.parametrize("hours", [-24, 24])
def test_a_clock_that_was_set(tmp_path: Path, hours: int) -> None:
    """A lease that lives is kept by its process, and a lease from another time by nobody."""
    (tmp_path / "run").mkdir()

    def clock() -> float:
        return time.time() + hours * 3600

    holder = Lease(tmp_path / "run", clock=clock)
    holder.take()
    with pytest.raises(RunError):
        Lease(tmp_path / "run", clock=clock).take()
    other = Lease(tmp_path / "run")
    other.take()  # a day away: no sign of life
    with pytest.raises(RunError):
        holder.check()
    other.release()
    holder.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_that_is_removed_during_a_training(start: Callable[..., Command], tmp_path: Path) -> None:
    words = (SLOW, "epochs=1000", "--save-every", "2", "--run", "run", *ONE)
    command = start(sys.executable, "-m", "grappe", "train", *words)
    pids_in_training(tmp_path / "run", 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    code, _, err = command.end()
    assert code == 2, err
    assert "The run's folder run is gone or was moved" in err
    assert err.count("grappe: ") == 1
    assert Run(tmp_path / "moved").latest() is not None
