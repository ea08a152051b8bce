"""On a busy machine OpenMP's threads sleep while they wait, unless the user has chosen."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grappe.launch import openmp
from grappe.launch.openmp import CHOICES, POLICY, is_busy, let_threads_sleep, sleeping_threads
from tests.commands import GRAPPE, Command

pytestmark = pytest.mark.slow

CORES = os.cpu_count() or 1
TRAIN = ("train", "digits", "batch_size=256", "--steps-only", "--steps", "1", "--run", "run", "--plan", "device=cpu")
SCRIPT = """
import os, torch, grappe
grappe.train("digits", {"device": "cpu"}, "run", fields={"epochs": 1}, batch_size=1437)
assert "OMP_WAIT_POLICY" not in os.environ
"""


@pytest.fixture(autouse=True)
def _nobody_has_asked_or_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
    openmp._was_busy.cache_clear()
    yield
    openmp._was_busy.cache_clear()


def test_the_machine_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter((False, True))
    monkeypatch.setattr(openmp, "is_busy", lambda: next(answers))
    for _ in range(2):  # for the processes' environment, and for the server that they are forked from
        with sleeping_threads():
            assert POLICY not in os.environ


def test_a_users_choice_stays() -> None:
    for name in CHOICES:
        environment = {name: "1"}
        let_threads_sleep(environment)
        assert environment == {name: "1"}


@pytest.mark.parametrize(
    ("running", "slurm", "busy"),
    [(1, False, False), (1 + CORES, False, True), (5 + CORES, False, True), (5 + CORES, True, False)],
)
def test_when_a_machine_is_busy(tmp_path: Path, running: int, slurm: bool, busy: bool) -> None:
    stat, environment = tmp_path / "stat", {"SLURM_JOB_ID": "7"} if slurm else {}
    stat.write_text(f"cpu 1 2 3\nprocs_running {running}\nprocs_blocked 0\n")
    let_threads_sleep(environment, lambda: is_busy(stat, environment))
    assert environment.get(POLICY) == ("passive" if busy else None)
    assert not is_busy(tmp_path / "none", {}), "a system that does not say counts as quiet"


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """More busy loops than there are cores; they count, and leave the cores to others."""
    loop = ["nice", "-n", "19", sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop) for _ in range(CORES + 2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with sleeping_threads(lambda: True):
        assert os.environ[POLICY] == "passive"
    assert POLICY not in os.environ
    monkeypatch.setenv(POLICY, "active")
    with sleeping_threads(lambda: True):
        assert os.environ[POLICY] == "active"
    assert os.environ[POLICY] == "active"


@pytest.fixture
def spins(start: Callable[..., Command], tmp_path: Path):
    """Reads the spin count of a waiting thread in each of a command's processes that load OpenMP."""

    def of(*words: str, **variables: str) -> list[int]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        code, _, err = start(*words, cwd=folder, OMP_DISPLAY_ENV="verbose", cold=True, **variables).end()
        assert code == 0, err
        # A single process loads torch itself, when its output goes to the run's log.
        said = err + "".join(log.read_text() for log in folder.glob("run/logs/*.log"))
        return [int(line.split("'")[1]) for line in said.splitlines() if "GOMP_SPINCOUNT" in line]

    return of


@pytest.mark.skipif(sys.platform != "linux", reason="LLVM's OpenMP prints another text")
def test_the_processes_of_a_command_sleep(spins, busy_machine) -> None:
    assert set(spins(GRAPPE, *TRAIN)) == {0}
    assert set(spins(GRAPPE, *TRAIN, GOMP_SPINCOUNT="7")) == {7}


@pytest.mark.skipif(sys.platform != "linux", reason="LLVM's OpenMP prints another text")
def test_the_processes_of_a_script_that_has_torch_sleep(spins, busy_machine) -> None:
    found = spins(sys.executable, "-c", SCRIPT)
    assert len(found) > 1
    assert len([count for count in found if count]) == 1  # the script itself has loaded torch before
