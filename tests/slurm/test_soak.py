"""Preemptions by the dozen, and signals at the worst moments. Run by `make soak`."""

import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Job

pytestmark = pytest.mark.soak


def test_a_signal_during_an_evaluation(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "evaluating"
    monkeypatch.setenv("SLOW_MARK", str(mark))
    job = Job(cluster, tmp_path, "evaluation", "--time", "10m")
    job.until(mark.exists, "it evaluates")
    cluster.run("scancel", "--signal=USR2", job.job)
    job.ends()
    assert job.restarts() == 1


def test_a_signal_during_a_save(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "save", "--time", "10m")
    job.trains(0)
    saves = job.run / "checkpoints"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list(saves.glob(".*")) and time.monotonic() < deadline:
        time.sleep(0.0005)
    cluster.run("scancel", "--signal=USR2", job.job)
    job.ends()
    assert job.restarts() == 1


def test_a_chain_where_jobs_may_not_requeue(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "chain", "--time", "10m", "--chain", "3")
    job.trains()
    cluster.run("scancel", "--signal=USR2", f"{job.job}_1", check=False)  # says no, and does it
    job.ends()
    assert job.restarts() == 1
    assert "is finished: nothing to do" in job.said()  # the third
