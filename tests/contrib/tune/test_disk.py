"""A study on a full disk, and by a clock that was set: it stops with a message, and goes on as if nothing was."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grappe.checkpoint.lease import STALE_SECONDS, Lease
from grappe.contrib.tune import journal as journal_module
from grappe.contrib.tune.coordinator import Coordinator
from grappe.contrib.tune.space import SearchOptions
from grappe.contrib.tune.study import Study, open_study
from grappe.contrib.tune.tune import search
from grappe.errors import RunError
from grappe.plan import Plan
from grappe.training.run import Run
from tests.contrib.tune.line import Line
from tests.small_disk import fill

SPACE = {"lr": "0.01..1:log", "width": "1|2|3"}
TASK = Line(epochs=2)
PLAN = Plan.parse("device=cpu,threads=1,workers=0")


def searched(folder: Path, watch: Callable[[Coordinator], None] = lambda progress: None) -> Study:
    return search(TASK, SPACE, PLAN, SearchOptions(trials=3, parallel=2), folder, watch=watch)[0]


def rows(study: Study) -> list[tuple]:
    return [(one.number, one.fields, one.state, one.value) for one in study.trials]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return searched(tmp_path_factory.mktemp("study") / "undisturbed")


def test_a_disk_that_is_full_while_trials_are_trained(disk: Path, undisturbed: Study) -> None:
    def watch(progress: Coordinator) -> None:
        if progress.trainings.running and not (disk / "ballast").exists():
            fill(disk)

    with pytest.raises(RunError, match=r"No space left on device"):
        searched(disk / "s", watch)
    (disk / "ballast").unlink()
    assert all(one.state == "open" for one in open_study(disk / "s").trials)
    assert rows(searched(disk / "s")) == rows(undisturbed)


def test_a_disk_that_is_full_at_the_start(disk: Path) -> None:
    fill(disk)
    with pytest.raises(RunError, match=r"s cannot be written: No space left on device: give another with --study"):
        searched(disk / "s")


def refusing(monkeypatch: pytest.MonkeyPatch, words: bytes, times: int) -> list[bytes]:
    """Makes the disk refuse a journal's lines with these words; returns what was refused."""
    write, refused = journal_module.write_all, list[bytes]()

    def full(handle: int, content: bytes) -> int:
        if words in content and len(refused) < times:
            refused.append(content)
            os.write(handle, content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content)

    monkeypatch.setattr(journal_module, "write_all", full)
    return refused


def test_a_result_that_cannot_be_written_ends_the_study_and_loses_nothing(
    tmp_path: Path, undisturbed: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, b'"state": "complete"', 99)
    with pytest.raises(RunError, match=r"No space left on device: free some space, .*then start the same"):
        searched(tmp_path / "s")
    monkeypatch.undo()
    assert rows(searched(tmp_path / "s")) == rows(undisturbed)
    assert Run(tmp_path / "s" / "trial-0000").read_description()["restarts"] == 0


def test_a_trial_that_cannot_be_written_before_it_starts_is_drawn_again(
    tmp_path: Path, undisturbed: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room again at once: nothing more is started, or drawn of what a failed write has left."""
    refused = refusing(monkeypatch, b'"number": 2', 1)
    with pytest.raises(RunError, match=r"No space left on device"):
        searched(tmp_path / "s")
    assert refused and not (tmp_path / "s" / "trial-0002").exists()
    assert rows(searched(tmp_path / "s")) == rows(undisturbed)


@pytest.mark.parametrize("hours", [-24, 24])
def test_a_clock_that_was_set(hours: int, tmp_path: Path, undisturbed: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a study; and before a coordinator, beside the lease of one that is dead."""
    true = time.time

    def watch(progress: Coordinator) -> None:
        if len(progress.trials) == 3:
            monkeypatch.setattr(time, "time", lambda: true() + hours * 3600)

    assert rows(searched(tmp_path / "s", watch)) == rows(undisturbed)
    assert abs(time.time() - true()) > STALE_SECONDS
    journal = tmp_path / "s" / "trials.jsonl"
    journal.write_bytes(journal.read_bytes()[:-1])
    dead = Lease(tmp_path / "s", clock=time.time)
    dead._write()
    monkeypatch.undo()
    assert rows(searched(tmp_path / "s")) == rows(undisturbed)
    assert not (tmp_path / "s" / "lease.json").exists()
