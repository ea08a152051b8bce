"""A run's folder: the status of starts that live, that were killed, and that have just begun."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from grappe.checkpoint.lease import STALE_SECONDS, Lease
from grappe.training.run import DESCRIPTION, Run


def killed_before_its_first_step(folder: Path) -> None:
    """Begins a run as a start does, and dies."""
    run = Run.create(folder, {"status": "running"})
    Lease(run.folder).take()
    os.kill(os.getpid(), signal.SIGKILL)


def status(run: Run) -> str:
    return run.read_status(run.read_description())


def test_a_start_that_was_killed_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    process = multiprocessing.get_context("fork").Process(target=killed_before_its_first_step, args=[tmp_path / "run"])
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    run = Run(tmp_path / "run")
    assert status(run) == "ended unexpectedly"
    lease = Lease(run.folder)
    lease.take()
    assert status(run) == "running"
    lease.release()


def test_a_start_is_running_between_its_description_and_its_lease(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {"status": "running"})
    assert status(run) == "running"
    long_ago = (run.folder / DESCRIPTION).stat().st_mtime - STALE_SECONDS - 1
    os.utime(run.folder / DESCRIPTION, (long_ago, long_ago))
    assert status(run) == "ended unexpectedly"
