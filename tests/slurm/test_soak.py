"""Preemptions by the dozen, and signals at the worst moments. Run by `make soak`."""

import random
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Job

pytestmark = pytest.mark.soak
PREEMPTIONS = 20


def test_twenty_preemptions(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At instants drawn at random from a few steps on; the run ends as if nothing had been."""
    draw = random.Random(0)
    job = Job(cluster, tmp_path, "soak", "--time", "30m", "--queue", "low", epochs=60)
    began = time.monotonic()
    for number in range(PREEMPTIONS):
        job.until(lambda number=number: job.restarts() >= number and job.pids(), f"start {number} trains")
        at = job.steps()
        job.until(lambda at=at: job.steps() > at + draw.randint(1, 12), "it goes on")
        cluster.run("srun", "-p", "high", "-N", "2", "--exclusive", "true")
    job.ends()
    recovered = job.restarts()
    with capsys.disabled():
        print(f"\n{PREEMPTIONS} preemptions, {recovered} recovered, {time.monotonic() - began:.0f} s")
    assert recovered == PREEMPTIONS


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
