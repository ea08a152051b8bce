"""Points as jobs: one script for each, checked before any is sent; and gathered from the runs that they leave."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from grappe.errors import PlanError, RunError, UsageError
from grappe.sites.sbatch import JobOptions
from grappe.training.run import Run
from grappe.verbs.measure import jobs, table
from grappe.verbs.measure.points import MeasureOptions
from grappe.verbs.submit.jobs import record_job
from tests.training.test_training import train

REQUEST = jobs.JobRequest(
    task="digits",
    fields=("lr=0.2", "batch_size=16"),
    plans=("replicate=4", "replicate=8"),
    options=MeasureOptions(steps=20, repeats=2),
    job=JobOptions(site="narval", account="def-someone", time="20m"),
    data=None,
)


def test_a_job_for_each_plan_and_repetition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = list(jobs.send(REQUEST, show=True))
    assert len({one.run for one in found}) == 4
    assert all(not one.job for one in found)
    assert "--nodes=1" in found[0].text
    assert "--nodes=2" in found[1].text
    for one in found:
        assert "lr=0.2 batch_size=16 --steps-only --steps 25" in one.text
        assert "#SBATCH --time=00:20:00" in one.text
    assert list(tmp_path.iterdir()) == []


def test_weak_scaling_gives_each_process_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.chdir(tmp_path)
    own = dataclasses.replace(REQUEST, options=MeasureOptions(steps=20, repeats=1, weak=True))
    texts = [one.text for one in jobs.send(own, show=True)]
    assert ["batch_size=64" in texts[0], "batch_size=128" in texts[1]] == [True, True]
    sizes = dataclasses.replace(own.options, batch_size=(8, 32))
    several = dataclasses.replace(own, options=sizes, plans=("replicate=2",))
    texts = [one.text for one in jobs.send(several, show=True)]
    assert ["batch_size=16 " in texts[0], "batch_size=64 " in texts[1]] == [True, True]


def test_runs_become_points_and_one_that_has_not_ended_a_row(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    Run(tmp_path / "c").describe(costs=None, plan="threads=1,replicate=2", status="running")
    places = [tmp_path / name for name in ("c", "a", "b")]
    alone, pair = jobs.gather(places)
    assert len(alone.trials) == 2
    assert alone.batch == 12
    assert alone.rate > 0
    assert "has not ended (running)" in pair.failure
    with pytest.raises(UsageError, match="nothing to gather yet"):
        jobs.gather(places[:1])
    with pytest.raises(RunError, match="is no run"):
        jobs.gather([tmp_path / "none"])


def test_a_job_that_waits_and_a_run_too_short_are_rows(tmp_path: Path) -> None:
    train(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "short")
    costs = [{**one, "timing": None} for one in Run(tmp_path / "short").read_description()["costs"]]
    Run(tmp_path / "short").describe(costs=costs, plan="threads=1,replicate=2")
    (tmp_path / "waits" / "logs").mkdir(parents=True)
    record_job(tmp_path / "waits", "7", "generic", "1 core")
    alone, short, waits = jobs.gather([tmp_path / name for name in ("waits", "short", "a")])
    assert not alone.failure
    assert "too short" in short.failure
    assert (waits.plan, "job 7 waits" in waits.failure) == ("waits", True)
    assert "failed: its job 7 waits" in "".join(table.table([alone, waits]).columns[2]._cells)


def test_nothing_is_sent_when_one_of_them_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    sent: list[str] = []
    monkeypatch.setattr("grappe.verbs.submit.submit._send", lambda script, text: sent.append(text))
    with pytest.raises(PlanError):
        list(jobs.send(dataclasses.replace(REQUEST, plans=("replicate=4", "replicat=8"))))
    with pytest.raises(UsageError, match="--steps=0"):
        MeasureOptions(steps=0)
    assert not sent
