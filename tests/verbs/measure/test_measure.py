"""grappe measure in real processes: a slow loader, a slow process and a small batch, each planted, each named."""

import json
import shutil
from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.contrib.slurm.jobs import record_job
from grappe.errors import PlanError, RunError, UsageError
from grappe.training.run import Run
from grappe.verbs.measure import measure as verb
from grappe.verbs.measure import verdict
from grappe.verbs.measure.points import MeasureOptions
from grappe.verbs.measure.verdict import content, table
from grappe.words import format_bytes
from tests.domain.test_exchange import FLOAT, of_gpt
from tests.parity.test_domain import GPT
from tests.sleeping import Sleeping
from tests.training.test_training import train

PLAN = "device=cpu,threads=1"


def measured(task: Sleeping, *plans: str, **options):
    batch_size = options.pop("batch_size", ())
    return verb.measure(task, plans, options=MeasureOptions(steps=5, repeats=1, batch_size=batch_size), **options)


def test_a_slow_loader_is_named_and_a_larger_batch_is_tried_where_it_is_asked_for() -> None:
    points = measured(Sleeping(load=0.01, ahead=0.01, backward=0.01), f"{PLAN},workers=0", advise=True)
    told = "\n".join(verdict.sentences(points))
    assert "waits for data" in told
    workers = verdict.advised_workers(points[0])
    assert workers is not None
    assert f"use workers={workers}" in told
    assert [point.batch // points[0].batch for point in points if point.origin == "advice"] == [4]


def test_a_slow_process_is_named() -> None:
    points = measured(Sleeping(ahead=0.01, late=0.04), f"{PLAN},replicate=2")
    told = "\n".join(verdict.sentences(points))
    assert "process 1 on" in told
    assert "most of it in forward" in told
    assert points[0].imbalance * points[0].batch == pytest.approx(0.04, rel=0.5)


def test_a_small_batch_is_named_and_a_plan_that_fails_is_a_row() -> None:
    lines: list[str] = []
    plans = (PLAN, f"{PLAN},tensor=2,batchnorm=sync")
    points = measured(Sleeping(ahead=0.01, backward=0.01), *plans, batch_size=(2, 16), note=lines.append)
    assert [(point.batch, bool(point.failure)) for point in points] == [(2, False), (2, True), (16, False), (16, True)]
    assert "slices of 2 samples are small" in "\n".join(verdict.sentences(points))
    assert points[0].flops == pytest.approx(2 * 2 * (9 + 6) + 2 * 6)  # no gradient of the first layer's input
    assert points[0].trials[0].processes[0].held["parameters"] == 4 * (12 + 8)
    assert len(lines) == 4
    known = json.loads(json.dumps(content(points, "sleeping")))
    assert known["points"][2]["speed_up"] > 4
    assert "batchnorm=sync" in known["points"][1]["failure"]
    assert table(points).row_count == 4


def test_what_parts_send_in_a_step_is_counted_and_a_training_is_announced() -> None:
    """The formula is of shapes alone: see tests/domain/test_exchange.py."""
    begun: list[str] = []
    task = GPT()
    points = measured(task, "device=cpu,threads=1,domain=2", begun=begun.append)
    formula = of_gpt(0, 2)
    parameters = sum(each.numel() for each in task.model().parameters())
    sent = {
        "attention": {what: formula["attention", what] for what in ("messages", "bytes")},
        "gradients": {"bytes": FLOAT * parameters},
    }
    assert content(points, "gpt")["points"][0]["sent"] == sent
    messages = {"attention": f" ({formula['attention', 'messages']} messages)", "gradients": ""}
    order = sorted(messages, key=lambda purpose: -sent[purpose]["bytes"])
    sizes = ", ".join(f"{purpose} {format_bytes(sent[purpose]['bytes'])}{messages[purpose]}" for purpose in order)
    assert f"in a step, process 0 sends {sizes}" in "\n".join(verdict.sentences(points))
    assert begun == ["training 1 of 1: device=cpu,domain=2,threads=1 …"]


def test_when_every_plan_fails_the_reason_is_told() -> None:
    with pytest.raises(UsageError, match=r"nothing could be measured: .*batchnorm=sync"):
        measured(Sleeping(), "device=cpu,tensor=2,batchnorm=sync")


SEND = ("measure", "digits", "lr=0.2", "--site=narval", "--account=def-someone", "--job-time=20m", "--dry-run")


def scripts(*words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The scripts of the jobs that a measurement submits."""
    assert app([*SEND, "--steps", "20", *words]) == 0
    return capsys.readouterr().out.split("#!/bin/bash")[1:]


PLANS = ("--plan=replicate=4", "--plan=replicate=8")


@pytest.mark.slow
def test_a_job_for_each_plan_and_repetition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    found = scripts(*PLANS, "batch_size=16", "--repeats=2", capsys=capsys)
    assert len({text.partition("--job-name=")[2].split()[0] for text in found}) == 4
    assert ["--nodes=1" in found[0], "--nodes=2" in found[1]] == [True, True]
    for text in found:
        assert "lr=0.2 batch_size=16 --steps-only --steps 25" in text
        assert "#SBATCH --time=00:20:00" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_weak_scaling_gives_each_process_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    texts = scripts(*PLANS, "batch_size=16", "--repeats=1", "--weak", capsys=capsys)
    assert ["batch_size=64" in texts[0], "batch_size=128" in texts[1]] == [True, True]
    texts = scripts("--plan=replicate=2", "batch_size=8,32", "--repeats=1", "--weak", capsys=capsys)
    assert ["batch_size=16 " in texts[0], "batch_size=64 " in texts[1]] == [True, True]


def test_runs_become_points_and_one_that_has_not_ended_a_row(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    Run(tmp_path / "c").describe(costs=[], plan="threads=1,replicate=2", status="running")
    places = [tmp_path / name for name in ("c", "a", "b")]
    alone, pair = verb.gather(places)
    assert len(alone.trials) == 2
    assert alone.batch == 12
    assert alone.rate > 0
    assert "has not ended (running)" in pair.failure
    with pytest.raises(UsageError, match="nothing to gather yet"):
        verb.gather(places[:1])
    with pytest.raises(RunError, match="is not a run"):
        verb.gather([tmp_path / "none"])


def test_a_job_that_waits_and_a_run_too_short_are_rows(tmp_path: Path) -> None:
    train(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "short")
    costs = [{**one, "timing": None} for one in Run(tmp_path / "short").read_description()["costs"]]
    Run(tmp_path / "short").describe(costs=costs, plan="threads=1,replicate=2")
    (tmp_path / "waits" / "logs").mkdir(parents=True)
    record_job(tmp_path / "waits", "7", "generic", "1 core")
    alone, short, waits = verb.gather([tmp_path / name for name in ("waits", "short", "a")])
    assert not alone.failure
    assert "too short" in short.failure
    assert (waits.plan, "job 7 waits" in waits.failure) == ("waits", True)
    assert "failed: its job 7 waits" in "".join(table([alone, waits]).columns[2]._cells)


def test_nothing_is_sent_when_one_of_them_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    sent: list[str] = []
    monkeypatch.setattr("grappe.contrib.slurm.submit._send", lambda script, text: sent.append(text))
    monkeypatch.setattr("grappe.contrib.slurm.slurm.check_controller", lambda: None)
    with pytest.raises(PlanError):
        app([*SEND[:-1], "--plan=replicate=4", "--plan=replicat=8"])
    assert not sent
