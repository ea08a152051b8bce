"""Arrays: ids in Slurm's form alone, a run for each task, and what is refused before anything is in the queue."""

import dataclasses
import json
from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.contrib.slurm import jobs, slurm
from grappe.contrib.slurm.array import Array, parse
from grappe.contrib.slurm.commands import read_submission
from grappe.contrib.slurm.resources import jobs_of
from grappe.contrib.slurm.script import render
from grappe.contrib.slurm.submit import job_script, submit_all
from grappe.errors import GrappeError, ProcessDied, RunError, UsageError
from grappe.sites.sbatch import JobOptions
from grappe.verbs import runs as runs_verb
from grappe.verbs.report.report import gather
from tests.contrib.slurm.test_jobs import shown

TRAIN = ("train", "digits", "seed={array}", "--plan", "device=cpu")


def of(*words: str, ids: str | None = "1-3", site: str = "generic", **options):
    """The submission of words after --."""
    account = None if site == "generic" else "def-x"
    job = JobOptions(site=site, account=account, env="here", array=ids, **options)
    return read_submission(words, job, app)


@pytest.mark.parametrize(
    ("text", "ids", "at_once", "written"),
    [
        ("1-20%4", range(1, 21), 4, "1-20%4"),
        ("1,3,5", (1, 3, 5), None, "1,3,5"),
        ("1-20:2", range(1, 20, 2), None, "1,3,5,7,9,11,13,15,17,19"),
        ("7,0-3,2%1", (0, 1, 2, 3, 7), 1, "0-3,7%1"),
        ("0", (0,), None, "0"),
    ],
)
def test_ids_are_slurms(text: str, ids, at_once: int | None, written: str) -> None:
    array = parse(text)
    assert array == Array(ids=tuple(ids), at_once=at_once)
    assert str(array) == written and parse(written) == array


@pytest.mark.parametrize(
    "text", ["", "a", "5-2", "1-3%0", "1-3%", "%4", "1-2:0", "1--2", "-1", "1-10001", "1-3 ", "1,,2", "1%2,3", "١"]
)
def test_other_ids_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write ids as Slurm does: 1-20, or 1,3,5, or 1-20:2, and %4") as refusal:
        parse(text)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("words", "options", "says"),
    [
        (("train", "digits"), {}, "the 3 tasks would train the same: write {array}, the id, as in seed={array}"),
        (("evaluate", "x"), {}, "--array is for train, launch and scripts, not for evaluate"),
        (TRAIN, {"chain": 2}, "each task of an array requeues itself: leave it out, or --array"),
        (TRAIN, {"ids": None}, "{array} is the id of a task of an array: give --array 1-20, or leave it out"),
        (("train", "digits", "seed=x{array}", "--plan", "device=cpu"), {}, "seed=x1"),
        ((*TRAIN, "--run", "a{array}"), {}, "has characters that sbatch or a shell reads as something else"),
    ],
)
def test_what_no_array_does_is_refused(words: tuple[str, ...], options, says: str, cluster_of_one) -> None:
    with pytest.raises(GrappeError) as refusal:
        list(submit_all([of(*words, **options)], show=True))
    assert says in str(refusal.value)
    assert refusal.value.exit_code == 2


@pytest.fixture
def cluster_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A Slurm of one node for CPUs, with the jobs in its queue."""
    queued = list[str]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "check_controller", lambda: None)
    monkeypatch.setattr(slurm, "sinfo", lambda layout: "cpu*|4|16000|(null)|7-00:00:00|1|1-infinite\n")
    monkeypatch.setattr(slurm, "queue", lambda *, expand: list(queued))
    return queued


def test_each_task_has_its_value_and_its_run(cluster_of_one) -> None:
    [made] = submit_all([of(*TRAIN)], show=True)
    lines = made.text.splitlines()
    assert "#SBATCH --array=1-3" in lines and "#SBATCH --requeue" in lines
    assert f"#SBATCH --output={made.run}/task-%4a/logs/job-%A_%a.out" in lines
    assert 'source "$run/logs/job.sh" task || exit 1' in lines
    assert 'train digits seed="${SLURM_ARRAY_TASK_ID:?' in made.text
    assert made.cost.endswith(", for each of 3 tasks")
    [asked] = jobs_of(of(*TRAIN))
    assert asked.fields_of_tasks == [("seed=1",), ("seed=2",), ("seed=3",)]


def test_a_launched_script_has_a_run_for_each_task(cluster_of_one, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import torch\n")
    for run in ([], ["--run", "mine"]):
        [made] = submit_all([of("launch", "--plan", "device=cpu", *run, "own.py", "--seed", "{array}")], show=True)
        [line] = [text for text in made.text.splitlines() if " -m grappe launch " in text]
        assert line.count("--run") == 1 and ' --run "${run:?' in line
        assert ' -- own.py --seed "${SLURM_ARRAY_TASK_ID:?' in line


def test_finished_tasks_are_left_out(cluster_of_one, tmp_path: Path) -> None:
    array = tmp_path / "runs" / "a"
    words = (*TRAIN, "--run", "runs/a")
    for number in (1, 2):
        (array / f"task-{number:04d}").mkdir(parents=True)
        (array / f"task-{number:04d}" / "done").touch()
    made = job_script(of(*words, ids="1-4%2"))
    assert str(made.array) == "3-4%2"
    assert "finished tasks are left out: 1-2" in made.warnings
    with pytest.raises(RunError, match=r"all tasks of .*/runs/a are finished: nothing to submit"):
        job_script(of(*words, ids="1-2"))
    (array / "run.json").touch()
    with pytest.raises(RunError, match="is a run, and an array has a folder of runs"):
        job_script(of(*words))


def test_each_task_counts_to_the_sites_limit(cluster_of_one: list[str]) -> None:
    with pytest.raises(UsageError, match="--chain=1001: narval-cpu lets a user have 1000 jobs: use fewer"):
        job_script(of("train", "digits", "--plan", "device=cpu", ids=None, site="narval", chain=1001), show=True)
    with pytest.raises(
        UsageError, match=r"1001 tasks are as many jobs, whatever % says. Of 1000 that a user may have on"
    ):
        job_script(of(*TRAIN, ids="1-1001%4", site="narval"), show=True)
    cluster_of_one += ["a job"] * 990
    assert job_script(of(*TRAIN, ids="1-10", site="narval")).array == parse("1-10")
    with pytest.raises(
        UsageError, match=r"at most 10 are free: submit fewer ids, and the others with the same --run later"
    ):
        job_script(of(*TRAIN, ids="1-11", site="narval"))


def test_where_no_job_requeues_the_same_again_goes_on(cluster_of_one, monkeypatch: pytest.MonkeyPatch) -> None:
    submission = of(*TRAIN)
    made = job_script(submission)
    requeues = dataclasses.replace(made.site, job=dataclasses.replace(made.site.job, requeue=False))
    monkeypatch.setattr("grappe.contrib.slurm.submit.laid_out", lambda asked: (made.layout, requeues, made.plan))
    made = job_script(submission)
    assert made.job.chain == 0 and "#SBATCH --no-requeue" in render(made)
    assert any("the same again submits what is not finished" in text for text in made.warnings)


@pytest.fixture
def array(tmp_path: Path) -> Path:
    """The folder of job 12, whose first task is finished; the second one has ended with exit code 3."""
    folder = tmp_path / "runs" / "a"
    for run, job in ((folder, "12"), (folder / "task-0001", "12_1"), (folder / "task-0002", "12_2")):
        (run / "logs").mkdir(parents=True)
        jobs.record_job(run, job, "generic", "nothing")
    (folder / "task-0001" / "done").touch()
    (folder / "task-0002" / "logs" / "job-12_2.end").write_text("3\n")
    return folder


def test_the_jobs_of_an_array_are_its_tasks(array: Path) -> None:
    assert jobs.wait(array) == jobs.wait(array / "task-0002") == 3
    with pytest.raises(RunError, match=r"is an array: name the run of a task, as .*/task-0001"):
        jobs.log_files(array)
    assert jobs.cancel([array, array / "task-0002"], dry_run=True) == ["12", "12_2"]
    assert "array, job 12: 1 of 2 finished" in shown(runs_verb.listing(array.parent))
    assert "submitted, job 12_2" in shown(runs_verb.listing(array))


def test_all_tasks_are_waited_for_before_an_error_is_said(array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def ended(job: str) -> slurm.End:
        asked.append(job)
        return slurm.End(state="CANCELLED", code=0)

    monkeypatch.setattr(slurm, "queue_now", lambda jobs: [])
    monkeypatch.setattr(slurm, "ended", ended)
    (array / "task-0001" / "done").unlink()
    (array / "task-0002" / "logs" / "job-12_2.end").unlink()
    with pytest.raises(ProcessDied, match=r"job 12_1 of .*/task-0001 was cancelled"):
        jobs.wait(array)
    assert sorted(asked) == ["12_1", "12_2"]


def test_a_report_of_an_array_is_of_its_runs(array: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        gather([array])
    for number in (1, 2):
        content = {"task": "digits", "id": str(number), "fields": {"seed": str(number)}}
        (array / f"task-{number:04d}" / "run.json").write_text(json.dumps(content))
    assert [row["run"] for row in gather([array])["results"]["rows"]] == ["task-0001", "task-0002"]
