"""Whatever Slurm does to a job, the run ends finished, with the samples and the curves of one that nobody disturbed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Job, kill

LONG = ("--time", "10m")


def test_preempted_by_a_higher_partition(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "preempted", *LONG, "--queue", "low", pause=0.15)  # srun may take seconds to ask
    job.trains()
    cluster.run("srun", "-p", "high", "-N", "2", "--exclusive", "true")  # waits until the job made room
    job.ends()
    assert job.restarts() == 1
    assert "exit code 75" in job.said()


def test_a_process_that_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "killed", *LONG)
    job.trains()
    kill(job.pids()[-1], signal.SIGKILL)
    job.ends()
    assert job.restarts() == 1
    assert "exit code 137" in (job.run / "logs" / "killed").read_text()


def test_a_node_that_goes_down(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "down", *LONG)
    job.trains()
    cluster.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    # Refused where Slurm has returned it to service by itself.
    cluster.run("scontrol", "update", "nodename=n1", "state=resume", check=False)
    job.ends()
    assert job.restarts() == 1


@pytest.mark.soak
def test_cut_by_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "limit", "--time", "1m", pause=1.0)
    job.ends()
    assert job.restarts() >= 1


@pytest.mark.soak
def test_requeued_by_hand(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "requeued", *LONG)
    job.trains()
    cluster.run("scontrol", "requeue", job.job)
    job.ends()
    assert job.restarts() == 1
