"""Studies on a real Slurm: trials as jobs that outlive their coordinator; and a study in one job, which is requeued."""

import json
import os
import signal
from pathlib import Path

import pytest

import grappe
from grappe.contrib.tune.study import Study, open_study
from grappe.errors import EXIT_INTERRUPTED, EXIT_OK
from grappe.training.run import Run
from tests.commands import until
from tests.faults.study_life import in_training, outcome
from tests.slurm.cluster import Cluster
from tests.slurm.coordinators import LINE, SPACE, coordinator, ends, jobs_of, says, words
from tests.slurm.jobs import submit
from tests.slurm.study import PLAN


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """While this file exists, a step takes a quarter of a second."""
    (tmp_path / "slow").touch()
    return tmp_path / "slow"


def local(folder: Path, **wanted) -> Study:
    """Makes the study that it is to be."""
    return grappe.tune(LINE, SPACE, PLAN, study=folder, fields={"epochs": 20}, **{"parallel": 2, **wanted})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study of three trials."""
    return local(tmp_path_factory.mktemp("undisturbed") / "s", trials=3)


def in_queue(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "-h", "-o", "%i").split()


def pid_of(folder: Path) -> int:
    """The process that holds a run's or a study's lease."""
    return int(json.loads((folder / "lease.json").read_text())["pid"])


def restarts(cluster: Cluster, job: str) -> str:
    return cluster.run("scontrol", "show", "job", job).partition(" Restarts=")[2].split()[0]


def restarted(study: Path) -> list[int]:
    """Returns how often the first two trials' trainings were started again."""
    return [Run(study / f"trial-{number:04d}").read_description()["restarts"] for number in (0, 1)]


def compared(found: Path, expected: Study) -> None:
    for name, value in outcome(expected.folder).items():
        assert outcome(found)[name] == value, name


@pytest.mark.slow
def test_jobs_outlive_their_coordinator(cluster: Cluster, tmp_path: Path, slow: Path, undisturbed: Study) -> None:
    """One is killed, and one warned of its end, while no coordinator lives; one has been submitted twice."""
    study = tmp_path / "s"
    with coordinator(study, *words(slow), trials=3) as first:
        until(lambda: len(in_training(study)) == 2, "two trials train")
        first.stop_signal()
        assert first.end()[0] == EXIT_INTERRUPTED
    [[killed], [warned]] = jobs_of(study)
    assert {killed, warned} == set(in_queue(cluster))
    twice = cluster.run("sbatch", "--parsable", str(study / "trial-0001" / "logs" / "submit-1.sh")).strip()
    # Three kills are behind it, after which a job goes on no more.
    (study / "trial-0000" / "logs" / "killed").write_text(f"job {killed}, start {killed}.0: exit code 137\n" * 3)
    os.kill(pid_of(study / "trial-0000"), signal.SIGKILL)
    until((study / "trial-0000" / "logs" / f"job-{killed}.end").exists, "the job of the killed one ends")
    cluster.run("scancel", "--batch", "--signal=USR2", warned)  # as Slurm does before the time limit
    until(lambda: restarts(cluster, warned) == "1", "the one that was warned is back in the queue")
    with coordinator(study, *words(slow), trials=3) as second:
        until(lambda: twice not in in_queue(cluster), "the one that is one too many is cancelled")
        slow.unlink()
        ends(second)
    assert [len(one) for one in jobs_of(study)] == [2, 1, 1]
    assert Run(study / "trial-0001").read_description()["restarts"] == 1
    compared(study, undisturbed)


def test_a_rung_is_a_job(cluster: Cluster, tmp_path: Path) -> None:
    halving = {"trials": 2, "parallel": 1, "halving": 2, "rungs": 2}
    with coordinator(tmp_path / "s", *words(tmp_path / "not there"), **halving) as command:
        ends(command)
    compared(tmp_path / "s", local(tmp_path / "local", **halving))
    assert [len(one) for one in jobs_of(tmp_path / "s")] == [
        len(one.rungs) for one in open_study(tmp_path / "s").trials
    ]


def test_a_job_that_pends_for_ever(cluster: Cluster, tmp_path: Path, slow: Path) -> None:
    study = tmp_path / "s"
    with coordinator(study, *words(slow), "--hold", trials=1) as command:
        says(command, "waiting: jobs are pending: 1 (JobHeldUser)")
        [job] = in_queue(cluster)
        cluster.run("scancel", job)
        assert command.end()[0] == EXIT_OK
    [trial] = open_study(study).trials
    assert trial.reason == f"its job {job} was cancelled before it began"


@pytest.mark.slow
def test_a_study_in_one_job_is_requeued(cluster: Cluster, tmp_path: Path, slow: Path, undisturbed: Study) -> None:
    """Warns the job of its end, then kills its coordinator."""
    study = tmp_path / "s"
    tune = ["tune", LINE, *words(slow), "--trials", "3", "--parallel", "2", "--plan", PLAN]
    submit("--", *tune, "--study", str(study), cwd=tmp_path)
    [job] = in_queue(cluster)
    try:
        until(lambda: len(in_training(study)) == 2, "two trials train")
        cluster.run("scancel", "--batch", "--signal=USR2", job)
        until(lambda: restarts(cluster, job) == "1", "it is back in the queue")
        # A run's lease is taken before its restart is written down.
        until(lambda: len(in_training(study)) == 2 and restarted(study) == [1, 1], "two trials train again")
        os.kill(pid_of(study), signal.SIGKILL)
        until(lambda: restarted(study) == [2, 2], "it goes on at once")
        assert restarts(cluster, job) == "1", "in the same job"
        slow.unlink()
        until(lambda: not in_queue(cluster), "it has ended")
    finally:
        cluster.run("scancel", job, check=False)
    compared(study, undisturbed)
    assert restarted(study) == [2, 2]
