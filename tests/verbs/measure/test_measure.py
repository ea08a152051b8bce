"""grappe measure in real processes: a slow loader, a slow process and a small batch, each planted, each named."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.errors import PlanError, RunError, UsageError
from grappe.sites.sbatch import JobOptions
from grappe.training.run import Run
from grappe.verbs.launch.launch import launch
from grappe.verbs.measure import measure as verb
from grappe.verbs.measure import verdict
from grappe.verbs.measure.points import MeasureOptions
from grappe.verbs.measure.verdict import content, table
from grappe.verbs.submit.jobs import record_job
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


PLANS = ("replicate=4", "replicate=8")
JOB = JobOptions(site="narval", account="def-someone", time="20m")
TWICE = MeasureOptions(steps=20, repeats=2)
send = functools.partial(verb.send, "digits", job=JOB, fields=("lr=0.2", "batch_size=16"), show=True)


@pytest.mark.slow
def test_a_job_for_each_plan_and_repetition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = list(send(PLANS, options=TWICE))
    assert len({one.run for one in found}) == 4
    assert all(not one.job for one in found)
    assert "--nodes=1" in found[0].text
    assert "--nodes=2" in found[1].text
    for one in found:
        assert "lr=0.2 batch_size=16 --steps-only --steps 25" in one.text
        assert "#SBATCH --time=00:20:00" in one.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_weak_scaling_gives_each_process_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = MeasureOptions(steps=20, repeats=1, weak=True)
    texts = [one.text for one in send(PLANS, options=options)]
    assert ["batch_size=64" in texts[0], "batch_size=128" in texts[1]] == [True, True]
    texts = [one.text for one in send(["replicate=2"], options=dataclasses.replace(options, batch_size=(8, 32)))]
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
    monkeypatch.setattr("grappe.verbs.submit.submit._send", lambda script, text: sent.append(text))
    monkeypatch.setattr("grappe.sites.slurm.check_controller", lambda: None)
    with pytest.raises(PlanError):
        list(send(("replicate=4", "replicat=8"), options=TWICE, show=False))
    assert not sent


SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
print("its own line")
data = TensorDataset(torch.randn(200, 16), torch.randint(0, 3, (200,)))
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
own = tuple(model.parameters()) if "own" in sys.argv else []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(int(sys.argv[1])):
    for x, y in DataLoader(data, 20, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.save(model.state_dict(), "trained.pt")
"""


def test_a_script_is_measured_under_each_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    plans = [PLAN, f"{PLAN},replicate=2"]
    typed = ["measure", "--steps", "8", "--repeats", "2", *(f"--plan={plan}" for plan in plans)]
    assert app([*typed, "--json", "--script", "train.py", "40"]) == 0
    said = capfd.readouterr()
    assert "its own line" not in said.out
    content = json.loads(said.out)
    alone, pair = content["points"]
    assert (content["task"], alone["plan"], pair["plan"]) == ("train.py", PLAN, "device=cpu,replicate=2,threads=1")
    assert [len(point["trials"]) for point in (alone, pair)] == [2, 2]
    assert (alone["batch"], pair["batch"], pair["processes"], alone["speed_up"]) == (20, 20, 2, 1.0)
    assert alone["samples_per_second"] > 100 and alone["memory"] > 1e7
    assert pair["shares"]["communication"] > 0
    assert not Path("runs").exists() and not Path("trained.pt").exists(), "which the script saves after ten steps"


def test_what_a_script_cannot_have_measured_is_a_row_or_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    options = MeasureOptions(steps=5, repeats=1)
    alone, pair = verb.measure_script("train.py", ["2", "own"], [PLAN, f"{PLAN},shard=2"], options=options)
    assert not alone.failure and "keeps parameters in own" in pair.failure
    with pytest.raises(UsageError, match="takes 0 steps of an optimizer, of which the first 5 warm up"):
        verb.measure_script("train.py", ["0"], [PLAN], options=options)
    with pytest.raises(PlanError, match="an unedited script can have"):
        verb.measure_script("train.py", ["2"], [PLAN, f"{PLAN},tensor=2"], options=options)
    Path("own.py").write_text("import grappe")
    with pytest.raises(UsageError, match=r"own.py uses grappe: give a script for one process"):
        verb.measure_script("own.py", [], [PLAN])
    for words in ("", "digits --script train.py", "--site narval --script train.py", "--script train.py --plan a"):
        with pytest.raises(UsageError, match=r"grappe measure needs a task; or a script|--plan after --script"):
            app(["measure", *words.split()])


def test_a_launched_run_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert launch("train.py", ["2"], PLAN, run=Path("run")) == 0
    (point,) = verb.gather([Path("run")])
    assert (point.plan, point.batch, len(point.trials)) == (PLAN, 20, 1)
    assert Run("run").read_description()["costs"][0]["samples"] == 400
