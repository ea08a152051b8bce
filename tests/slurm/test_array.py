"""Arrays on a real Slurm: whatever happens to some of their tasks, each run is that of a training alone."""

import json
import os
import signal
from pathlib import Path

import pytest

import grappe
from grappe.errors import EXIT_INTERRUPTED
from grappe.training.run import Run
from tests.commands import until
from tests.faults.study_life import outcome
from tests.slurm.cluster import Cluster
from tests.slurm.coordinators import LINE, coordinator, ends, jobs_of
from tests.slurm.jobs import grappe as command
from tests.slurm.jobs import run_of, submit
from tests.slurm.study import PLAN

TASKS = range(1, 13)
FIELDS = {"epochs": 20, "width": 2}  # 40 steps
WORDS = ("seed={array}", *(f"{name}={value}" for name, value in FIELDS.items()), "pause=3")


def figures(run: Path) -> tuple[list[list[object]], dict[str, list[float]]]:
    """The losses of all steps and evaluations, and the last weights."""
    kinds = (Run(run).records(kind) for kind in ("step", "evaluation"))
    records = [[record[name] for name in ("step", "loss", "samples")] for records in kinds for record in records]
    weights = grappe.load(run).state_dict()
    return records, {name: value.flatten().tolist() for name, value in weights.items()}


def alone(folder: Path) -> list[tuple[list[list[object]], dict[str, list[float]]]]:
    """Trains the same without Slurm, and without a disturbance."""
    study = grappe.tune(LINE, {"seed": list(TASKS)}, PLAN, sampler="grid", study=folder, fields=FIELDS, parallel=2)
    return [figures(study.run_folder(trial.number)) for trial in study.trials]


def trains(run: Path) -> bool:
    """Returns whether a run is being trained, beyond its first checkpoint."""
    return (run / "lease.json").exists() and len(list(run.glob("checkpoints/step-*"))) > 1


def restarts(run: Path) -> int:
    return Run(run).read_description()["restarts"] if Run.is_run(run) else -1


@pytest.mark.slow
def test_half_of_its_tasks_are_killed(cluster: Cluster, tmp_path: Path) -> None:
    """Two by SIGKILL, one by Slurm with its step, one warned as before the time limit, two put back by Slurm."""
    slow = tmp_path / "slow"
    slow.touch()
    train = ("train", LINE, *WORDS, f"while_there={slow}", "--save-every", "4", "--plan", PLAN, "--run", "runs/a")
    said = submit("--array", "1-12", "--", *train, cwd=tmp_path)
    assert ", for each of 12 tasks; run " in said
    array = tmp_path / "runs" / "a"
    runs = {number: array / f"task-{number:04d}" for number in TASKS}
    job = json.loads((array / "logs" / "jobs.jsonl").read_text())["job"]
    until(lambda: all(map(trains, runs.values())), "all train")
    for number in (1, 2):
        os.kill(int(json.loads((runs[number] / "lease.json").read_text())["pid"]), signal.SIGKILL)
    cluster.run("scancel", "--signal=KILL", f"{job}_3.0")
    cluster.run("scancel", "--batch", "--signal=USR2", f"{job}_4")
    for number in (5, 6):
        cluster.run("scontrol", "requeue", f"{job}_{number}")
    until(lambda: [restarts(runs[number]) for number in range(1, 7)] == [1] * 6, "six go on")
    slow.unlink()
    command("wait", "runs/a", cwd=tmp_path)
    assert [restarts(run) for run in runs.values()] == [1] * 6 + [0] * 6
    assert f"array, job {job}: 12 of 12 finished" in command("runs", cwd=tmp_path)
    assert f"all tasks of {array} are finished" in command(
        "submit", "--site", "generic", "--array", "1-12", "--", *train, cwd=tmp_path, code=2
    )
    for run, expected in zip(runs.values(), alone(tmp_path / "alone"), strict=True):
        assert figures(run) == expected, run


def test_a_script_is_told_its_id(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os, sys\nprint('id', os.environ['SLURM_ARRAY_TASK_ID'], *sys.argv[1:])\n")
    array = Path(run_of(submit("--array", "2-3%1", "--gpus", "0", "--", "own.py", "--seed={array}", cwd=tmp_path)))
    command("wait", str(array), cwd=tmp_path)
    for number in (2, 3):
        log = command("logs", str(array / f"task-{number:04d}"), cwd=tmp_path)
        assert f"0: id {number} --seed={number}" in log


def test_sbatch_refuses_an_array_and_nothing_is_left(cluster: Cluster, tmp_path: Path) -> None:
    train = ("--", "train", LINE, "seed={array}", "--plan", PLAN, "--run", "runs/a")
    said = command("submit", "--site", "generic", "--array", "1-1001", *train, cwd=tmp_path, code=2)
    assert "Invalid job array specification\n  the ids of an array are below MaxArraySize" in said
    assert not (tmp_path / "runs").exists()


def test_a_study_is_an_array_and_outlives_its_coordinator(cluster: Cluster, tmp_path: Path) -> None:
    """One task is killed while no coordinator lives; another one was cancelled, and is submitted again."""
    slow, study = tmp_path / "slow", tmp_path / "s"
    slow.touch()
    fields = ["lr=0.1|0.2|0.3", "epochs=20", "pause=3", f"while_there={slow}"]
    wanted = {"sampler": "grid", "parallel": 3, "array": True}
    with coordinator(study, *fields, **wanted) as first:
        until(lambda: all(trains(study / f"trial-{number:04d}") for number in range(3)), "three trials train")
        first.stop_signal()
        assert first.end()[0] == EXIT_INTERRUPTED
    [[killed], [cancelled], [other]] = jobs_of(study)
    assert [job.partition("_")[2] for job in (killed, cancelled, other)] == ["0", "1", "2"]
    os.kill(int(json.loads((study / "trial-0000" / "lease.json").read_text())["pid"]), signal.SIGKILL)
    cluster.run("scancel", cancelled)
    until(lambda: restarts(study / "trial-0000") == 1, "the killed one goes on")
    slow.unlink()
    with coordinator(study, *fields, **wanted) as second:
        ends(second)
    assert [len(jobs) for jobs in jobs_of(study)] == [1, 2, 1]
    expected = grappe.tune(
        LINE, {"lr": [0.1, 0.2, 0.3]}, PLAN, sampler="grid", study=tmp_path / "e", fields={"epochs": 20}
    )
    assert outcome(study)["steps"] == outcome(expected.folder)["steps"]
