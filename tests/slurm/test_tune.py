"""Studies on a real Slurm: trials as jobs that outlive their coordinator; and a study in one job, which is requeued."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import grappe
from grappe.checkpoint.lease import Lease
from grappe.training.run import Run
from grappe.verbs.tune.study import open_study
from tests.commands import Command, until
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import grappe as run_grappe
from tests.slurm.study import PLAN
from tests.verbs.tune import line

LINE = str(Path(line.__file__))
SPACE = ("lr=0.01..1:log", "width=1|2")
ROOT = str(Path(__file__).parents[2])


def coordinator(study: Path, *words: str, trials: int = 3, parallel: int = 2, halving: str = "") -> Command:
    path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "SLURM_CONF": os.environ["SLURM_CONF"]}
    numbers = (str(trials), str(parallel), halving)
    command = (sys.executable, "-m", "tests.slurm.study", str(study), LINE, *numbers, *SPACE, *words)
    return Command(*command, cwd=study.parent, **more)


def rows(study: Path) -> list[tuple]:
    return [(one.number, one.fields, one.rungs, one.value) for one in open_study(study).trials]


def jobs_of(study: Path) -> list[list[str]]:
    files = sorted(study.glob("trial-*/logs/jobs.jsonl"))
    return [[json.loads(text)["job"] for text in file.read_text().splitlines()] for file in files]


def in_queue(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "-h", "-o", "%i").split()


def test_jobs_outlive_their_coordinator(cluster: Cluster, tmp_path: Path) -> None:
    study = tmp_path / "s"
    first = coordinator(study, "epochs=6", "pause=0.3")
    try:
        until(lambda: len(list(study.glob("trial-*/metrics.jsonl"))) == 2, "two trials train")
        first.process.kill()
        first.process.wait()
        assert len(in_queue(cluster)) == 2
    finally:
        first.close()
    victim = int(json.loads((study / "trial-0000" / "lease.json").read_text())["pid"])
    os.kill(victim, 9)  # a trial's process, while nobody looks: its job requeues itself
    second = coordinator(study, "epochs=6", "pause=0.3")
    try:
        code, out, err = second.end()
        assert code == 0, err
        assert "best: trial" in out
    finally:
        second.close()
    assert [len(one) for one in jobs_of(study)] == [1, 1, 1]  # none was submitted twice
    assert Run(study / "trial-0000").read_description()["restarts"] == 1
    local = grappe.tune(
        LINE, {"lr": "0.01..1:log", "width": "1|2"}, PLAN, trials=3, parallel=2, study=tmp_path / "local",
        fields={"epochs": "6", "pause": "0.0"},
    )  # fmt: skip
    assert rows(study) == rows(local.folder)


def test_a_job_that_pends_for_ever(cluster: Cluster, tmp_path: Path) -> None:
    study = tmp_path / "s"
    first = coordinator(study, "epochs=1", "--hold", trials=1)
    try:
        until(lambda: in_queue(cluster), "it pends")
        [job] = in_queue(cluster)
        first.stop_signal()
        code, _, err = first.end()
        assert code == 75, err
        assert "waiting: jobs pend: 1 (JobHeldUser)" in err
    finally:
        first.close()
    assert in_queue(cluster) == [job]
    second = coordinator(study, "epochs=1", "--hold", trials=1)
    try:
        until(lambda: Lease(study).held_by(), "the second looks")
        cluster.run("scancel", job)
        code, _, err = second.end()
        assert code == 0, err
    finally:
        second.close()
    [trial] = open_study(study).trials
    assert trial.reason == f"its job {job} was cancelled before it began"


@pytest.mark.parametrize("number", ["USR1"])
def test_a_study_in_one_job_is_requeued(number: str, cluster: Cluster, tmp_path: Path) -> None:
    study = tmp_path / "s"
    words = ["tune", LINE, *SPACE, "epochs=6", "pause=0.1", "--trials", "3", "--plan", PLAN]
    run_grappe(
        "submit", "--site", "generic", "--time", "10m", "--no-doctor", "--", *words, "--study", str(study),
        cwd=tmp_path,
    )  # fmt: skip
    [job] = in_queue(cluster)
    try:
        until(lambda: Run.is_run(study / "trial-0001"), "the second trial trains")
        cluster.run("scancel", f"--signal={number}", job)
        until(lambda: not in_queue(cluster), "it has ended")
    finally:
        cluster.run("scancel", job, check=False)
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)
    found = open_study(study)
    assert [one.state for one in found.trials] == ["complete"] * 3
    for folder in sorted(study.glob("trial-*")):
        steps = [record["step"] for record in Run(folder).records("step")]
        assert steps == list(range(1, 13))
