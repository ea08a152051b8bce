"""Tests of the delivery of steps to watchers: all steps, in order, in groups unless a watcher needs each."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from grappe.errors import DivergedError
from grappe.profiling.chronometer import Chronometer
from grappe.step.closure import step_with_closure
from grappe.training import loop
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher
from grappe.training.watchers.curves import Curves
from grappe.training.watchers.watcher_list import WatcherList, gradients_hooked
from grappe.training.worker import worker
from tests.parity.optimizers import SAM
from tests.parity.tasks import Images
from tests.training.test_training import HERE, Poisoned, request_of
from tests.training.watchers.made_up import record, run_info


class Calls(Watcher):
    def __init__(self) -> None:
        self.found: list[tuple] = []

    def started(self, info: RunInfo) -> None:
        self.found.append(("started", info.start, info.last_step, info.total_steps))

    def stepped(self, record: Record) -> None:
        self.found.append(("stepped", record.step))

    def evaluated(self, step: int, scores: object) -> None:
        self.found.append(("evaluated", step))

    def saving(self, step: int) -> None:
        self.found.append(("saving", step))

    def ended(self, outcome: Outcome | None) -> None:
        self.found.append(("ended", outcome.status if outcome else None))


class Prompt(Calls):
    prompt = True


def train(folder: Path, watcher: Watcher, task: Images | None = None, **options: int) -> None:
    fields = {"data": folder, "options": Options(**options), "quiet": True, "per_process_watchers": (watcher,)}
    worker(request_of(folder, task or Images(epochs=2), **fields), HERE, folder.parent)


@pytest.mark.parametrize("kind", [Calls, Prompt])
@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_every_step_comes_in_order_and_before_what_follows_it(tmp_path, monkeypatch, kind, seconds):
    monkeypatch.setattr(loop, "DELIVERY_SECONDS", seconds)
    calls = kind()
    train(tmp_path / "run", calls, evaluate_every=2, save_every=4, steps=5)
    assert calls.found == [
        ("started", 0, 5, 6),
        ("stepped", 1), ("stepped", 2), ("evaluated", 2),
        ("stepped", 3), ("stepped", 4), ("evaluated", 4), ("saving", 4),
        ("stepped", 5), ("evaluated", 5), ("saving", 5),
        ("ended", "paused"),
    ]  # fmt: skip


def test_after_an_error_watchers_have_seen_every_step_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "DELIVERY_SECONDS", 1e9)
    calls = Calls()
    with pytest.raises(DivergedError) as error:
        train(tmp_path / "run", calls, Poisoned(epochs=2, batch_size=2))
    step = int(str(error.value).partition(", step ")[2].partition(" ")[0])
    assert calls.found[1:] == [*(("stepped", one) for one in range(1, step)), ("ended", None)]
    assert [one["step"] for one in Run(tmp_path / "run").records("step")] == list(range(1, step))


def test_one_that_wants_each_step_has_all_called_after_each() -> None:
    assert WatcherList([Calls(), Prompt()]).prompt
    assert not WatcherList([Calls()]).prompt
    assert not WatcherList([Calls()]).wanting_gradients


class Slopes(Watcher):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def gradients_ready(self, step: int, parameters) -> None:
        self.seen.append(float(parameters[0][1].grad))


def test_sams_gradients_are_those_of_the_weights_before_its_step() -> None:
    weight, slopes = nn.Parameter(torch.ones(1)), Slopes()
    sam = SAM([weight], torch.optim.SGD, lr=0.1, rho=0.5)
    chronometer = Chronometer(torch.device("cpu"), 0.0)
    chronometer.on_optimizer(sam, [("weight", weight)])

    def compute() -> float:
        weight.grad = None
        weight.square().sum().backward()
        return 0.0

    with gradients_hooked(WatcherList([slopes]), lambda: 0, chronometer):
        step_with_closure(sam, compute)
    assert slopes.seen == [2.0]


def test_curves_are_on_disk_after_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that is killed: quick steps too, however few there are."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    curves = Curves()
    curves.started(run_info(tmp_path))
    for step in range(1, 30):
        curves.stepped(record(step))
        now += 0.1
        lines = (tmp_path / "metrics.jsonl").read_text().count("\n")
        assert lines >= step - 11
    curves.ended(None)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, 30))
