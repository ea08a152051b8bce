"""Trials as Slurm jobs: found by name, at most so many, and how each end is taken, on a mock of Slurm."""

import dataclasses
import json
from pathlib import Path

import pytest

from grappe.contrib.slurm import jobs, slurm
from grappe.contrib.slurm.resources import Submission
from grappe.contrib.slurm.slurm import End, Entry, SlurmError
from grappe.contrib.slurm.submit import Submitted
from grappe.contrib.tune import trainings as trainings_module
from grappe.contrib.tune.trainings import NotNow, SlurmTrainings
from grappe.errors import DataError, OutOfMemory, ProcessDied, UsageError
from grappe.plan import Plan
from grappe.sites.sbatch import JobOptions
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.task_reference import TaskReference
from tests.contrib.tune import line
from tests.patience import PATIENCE_SECONDS

POLICY = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


class Played:
    """A Slurm that takes jobs, and forgets them when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[Entry] = []
        self.cancelled: list[str] = []
        self.submitted: list[Submission] = []
        self.refusal = ""
        self.ends: dict[str, End] = {}
        monkeypatch.setattr(slurm, "queue", lambda *, expand: list(self.entries))
        monkeypatch.setattr(slurm, "cancel", self.cancelled.extend)
        monkeypatch.setattr(slurm, "ended", self.ends.get)
        monkeypatch.setattr(trainings_module, "submit_all", self.submit)
        monkeypatch.setattr(jobs, "QUERY_SECONDS", 0.0)

    def submit(self, submissions: list[Submission]) -> list[Submitted]:
        (submission,) = submissions
        if self.refusal:
            raise SlurmError(self.refusal)
        self.submitted.append(submission)
        job = str(100 + len(self.submitted))
        self.add(job, submission.job.name or "")
        assert submission.run is not None
        (submission.run / "logs").mkdir(parents=True, exist_ok=True)
        return [Submitted(run=submission.run, job=job, text="", cost="")]

    def add(self, job: str, name: str, state: str = "RUNNING", reason: str = "None") -> None:
        self.entries.append(Entry(job=job, name=name, state=state, reason=reason, start="N/A", left="", nodes="1"))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def trainings(study: Path, parallel: int = 2) -> SlurmTrainings:
    options = JobOptions(site="generic", dependency="afterok:1")
    return SlurmTrainings(study, options, parallel=parallel)


def request(study: Path, number: int) -> Request:
    reference = TaskReference.of(str(Path(line.__file__)), {"lr": "0.2"})
    options = Options(part=1 / 3, training_metrics=True, log=("tensorboard",))
    plan = Plan.parse("device=cpu,threads=1")
    return Request(task=reference, plan=plan, run=study / f"trial-{number:04d}", options=options)


def test_a_trial_is_a_job_with_its_name_and_words(played: Played, tmp_path: Path) -> None:
    mine = trainings(tmp_path)
    mine.start(3, request(tmp_path, 3))
    assert mine.running == {3}
    [made] = played.submitted
    assert made.command == "train"
    assert made.fields == ("lr=0.2",)
    assert made.arguments[2:] == ("--part", str(1 / 3), "--training-metrics", "--log", "tensorboard")
    assert made.plans == ("device=cpu,threads=1",)
    assert made.job.dependency == "afterok:1,singleton"
    assert made.job.name.endswith("-0003") and len(made.job.name) <= 64


def test_a_restarted_coordinator_finds_its_jobs(played: Played, tmp_path: Path) -> None:
    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    mine.start(1, request(tmp_path, 1))
    played.add("7", "another-study-0000")
    second = played.submitted[0].job.name or ""
    played.add("999", second)  # a job that a killed coordinator had submitted twice
    mine = trainings(tmp_path)
    assert played.cancelled == ["999"]
    mine.start(0, request(tmp_path, 0))
    with pytest.raises(NotNow, match="jobs of earlier trials are in the queue still"):
        mine.start(5, request(tmp_path, 5))
    mine.start(1, request(tmp_path, 1))
    assert len(played.submitted) == 2
    another = trainings(tmp_path / "other")
    another.start(0, request(tmp_path / "other", 0))
    assert len(played.submitted) == 3


@pytest.mark.parametrize(
    ("refusal", "refused"),
    [
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", NotNow),
        (f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}", NotNow),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", NotNow),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", NotNow),
        ("sbatch: error: Invalid account", SlurmError),
        ("sbatch: error: Requested time limit is invalid (missing or exceeds some limit)", SlurmError),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{POLICY}", SlurmError),
        (POLICY, SlurmError),
    ],
)
def test_a_full_queue_is_waited_for_and_another_refusal_stops_the_study(
    refusal: str, refused: type[Exception], played: Played, tmp_path: Path
) -> None:
    mine = trainings(tmp_path)
    played.refusal = refusal
    words = "sbatch takes no more jobs now" if refused is NotNow else "sbatch: error"
    with pytest.raises(refused, match=words):
        mine.start(0, request(tmp_path, 0))
    played.refusal = ""
    assert mine.poll(0.0) == []
    mine.start(0, request(tmp_path, 0))


def test_a_refusal_that_says_no_limit_is_waited_for_if_jobs_were_taken(played: Played, tmp_path: Path) -> None:
    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    played.refusal = POLICY
    with pytest.raises(NotNow, match="sbatch takes no more jobs now"):
        mine.start(1, request(tmp_path, 1))


def test_a_later_rungs_job_lives_while_the_earlier_one_completes(played: Played, tmp_path: Path) -> None:
    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    (tmp_path / "trial-0000" / "logs" / "job-101.end").write_text("0")
    [ended] = mine.poll(0.0)
    assert ended.outcome == "trained"
    [old] = played.entries
    played.entries = [dataclasses.replace(old, state="COMPLETING")]
    mine.start(0, request(tmp_path, 0))  # the next rung
    assert mine.poll(0.0) == []
    played.entries[0] = old  # as squeue may show it still
    assert mine.poll(0.0) == []
    assert not played.cancelled
    assert mine.running == {0}
    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    assert len(played.submitted) == 2


def test_of_two_jobs_the_one_that_is_followed_is_kept(played: Played, tmp_path: Path) -> None:
    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    played.add("99", played.entries[0].name)  # one that requeued itself, say
    assert mine.poll(0.0) == []
    assert played.cancelled == ["99"]
    assert mine.running == {0}


def test_a_job_whose_submission_was_not_recorded_is_when_it_is_found(played: Played, tmp_path: Path) -> None:
    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    for _ in range(2):
        mine = trainings(tmp_path)
        mine.start(0, request(tmp_path, 0))
    assert [one["job"] for one in jobs.submitted(tmp_path / "trial-0000")] == ["101"]


def test_a_study_is_the_same_by_a_link(played: Played, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name in ("real", "link"):
        mine = trainings(tmp_path / name)
        mine.start(0, request(tmp_path / name, 0))
    assert len(played.submitted) == 1


def test_jobs_that_pend_are_said_with_their_reasons(played: Played, tmp_path: Path) -> None:
    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    name = played.entries.pop().name
    played.add("101", name, "PENDING", "ReqNodeNotAvail")
    assert mine.poll(0.0) == []
    assert mine.notes == "jobs are pending: 1 (ReqNodeNotAvail)"
    assert mine.running == {0}


@pytest.mark.parametrize(
    ("code", "error", "how", "told"),
    [
        ("0", None, "trained", ""),
        ("75", None, "killed", "exit code 75"),
        ("137", None, "killed", "exit code 137"),
        ("2", OutOfMemory("too large\nand more"), "failed", "OutOfMemory: too large"),
        ("1", None, "failed", "ended with exit code 1: grappe logs"),
        ("1", ProcessDied("process 0 was killed by SIGKILL"), "killed", "it was killed (by SIGKILL"),
        ("1", ProcessDied("process 0 failed with KeyError"), "failed", "ProcessDied: process 0 failed with KeyError"),
        ("2", DataError("no data"), "error", ""),
        ("2", UsageError("no"), "error", ""),
    ],
)
def test_how_a_job_ends(code: str, error: Exception | None, how: str, told: str, played: Played, tmp_path) -> None:
    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    logs = tmp_path / "trial-0000" / "logs"
    if error is not None:
        why = {"error": type(error).__name__, "message": str(error), "killed": how == "killed"}
        (logs / "job-101.why").write_text(json.dumps(why))
    (logs / "job-101.end").write_text(code)
    [ended] = mine.poll(0.0)
    assert ended.outcome == how
    assert told in ended.reason
    if how == "error":
        assert type(ended.error) is type(error)
        assert str(error) in str(ended.error)
    assert not mine.running


@pytest.mark.parametrize("name", ["nearest", "Path", "__name__", 3, None])
def test_what_a_job_has_written_is_not_called(name: object, played: Played, tmp_path: Path) -> None:
    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    logs = tmp_path / "trial-0000" / "logs"
    (logs / "job-101.why").write_text(json.dumps({"error": name, "message": "x", "killed": False}))
    (logs / "job-101.end").write_text("1")
    [ended] = mine.poll(0.0)
    assert ended.reason.startswith("its job 101 ended with exit code 1: grappe logs ")


@pytest.mark.parametrize(
    ("state", "began", "how", "told"),
    [
        ("CANCELLED", False, "failed", "was cancelled before it began"),
        ("CANCELLED", True, "killed", "ended as CANCELLED"),
        ("OUT_OF_MEMORY", True, "failed", "took more than --mem"),
        ("NODE_FAIL", True, "killed", "ended as NODE_FAIL"),
        ("TIMEOUT", True, "killed", "ended as TIMEOUT"),
        ("DEADLINE", False, "failed", "could not begin in time"),
    ],
)
def test_how_slurm_ends_a_job(state: str, began: bool, how: str, told: str, played: Played, tmp_path: Path) -> None:
    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    if began:
        (tmp_path / "trial-0000" / "logs" / "job-101.out").touch()
    played.entries.clear()
    played.ends["101"] = End(state=state, code=0)
    [ended] = mine.poll(0.0)
    assert ended.outcome == how
    assert told in ended.reason


def test_slurm_may_be_silent_for_a_while(played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*, expand: bool) -> list[Entry]:
        raise SlurmError("squeue: error: Unable to contact slurm controller")

    mine = trainings(tmp_path)
    mine.start(0, request(tmp_path, 0))
    monkeypatch.setattr(slurm, "queue", silent)
    assert mine.poll(0.0) == []
    assert mine.notes.startswith("Slurm does not answer")
    assert mine.running == {0}
    (tmp_path / "trial-0000" / "logs" / "job-101.end").write_text("0")
    assert [one.outcome for one in mine.poll(PATIENCE_SECONDS)] == ["trained"]
    assert mine.poll(0.0) == []  # nor is there a job any more
    mine.start(0, request(tmp_path, 0))
    mine.interrupt()
    [ended] = mine.poll(1.0)
    assert ended.outcome == "stopped"
