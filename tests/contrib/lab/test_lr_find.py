"""The same curves under any plan; and nothing is left behind, nor anything of a run touched."""

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from grappe.contrib.lab import lr_find as verb
from grappe.errors import TaskError, UsageError
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.training import short_run
from grappe.training.task_reference import TaskReference
from tests.faults.resuming import run as train
from tests.parity.optimizers import TunedTokens
from tests.parity.tasks import Images
from tests.processes import Pool

RAMP = verb.Ramp(steps=40, seeds=2)


def searched(process: ProcessRank, rendezvous_folder: Path, asked: Any) -> tuple:
    return short_run.called(asked, process, rendezvous_folder)


def found(
    pool: Pool, plan: str, task: Images, ramp: verb.Ramp = RAMP
) -> tuple[float, bool, tuple[verb.LossCurve, ...]]:
    wanted = Plan.parse(f"{plan},threads=1" if plan else "threads=1")
    asked = functools.partial(
        short_run.with_task, functools.partial(verb.searched, ramp), TaskReference.of(task), wanted, Path()
    )
    everyone = pool.run(f"{__name__}:searched", wanted.processes, asked)
    assert all(one == everyone[0] for one in everyone), "the processes do not agree"
    return everyone[0]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> tuple[float, bool, tuple[verb.LossCurve, ...]]:
    return found(pool, "", Images(dropout=0.0))


@pytest.mark.parametrize(
    "plan", ["replicate=2", "shard=2", "engine=lightning,replicate=2", "engine=deepspeed,shard=2,zero=1"]
)
def test_the_curves_are_those_of_one_process(pool: Pool, alone: tuple, plan: str) -> None:
    own, is_field, curves = found(pool, plan, Images(dropout=0.0))
    assert (own, is_field) == alone[:2] == (0.1, False)
    assert [curve.seed for curve in curves] == [0, 1]
    for one, other in zip(alone[2], curves, strict=True):
        stable = sum(rate < 0.5 for rate in one.lr)  # beyond it, where training is chaos, rounding is too
        assert stable > RAMP.steps // 2
        assert other.lr[:stable] == pytest.approx(one.lr[:stable], rel=1e-12)
        assert other.loss[:stable] == pytest.approx(one.loss[:stable], rel=1e-5)


def test_optimizers_with_modes_and_stages_have_curves(pool: Pool) -> None:
    _, _, curves = found(
        pool, "pipeline=2,microbatches=2", TunedTokens(by="schedule-free"), verb.Ramp(steps=20, seeds=1)
    )
    assert len(curves[0].loss) > 10


def tree(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_a_run_is_not_touched_and_nothing_is_left(pool: Pool, here: Path) -> None:
    train(pool, Images(), "", here / "run", 3, save_every=2)
    before = tree(here)
    verb.lr_find(Images(), "threads=1", ramp=verb.Ramp(steps=20, seeds=1))
    assert tree(here) == before
    assert "resuming from step 2" in train(pool, Images(), "", here / "run", save_every=2)


def shown(curves: tuple[verb.LossCurve, ...], ramp: verb.Ramp) -> verb.LearningRates:
    advice = verb.advise(curves, ramp.steps)
    return verb.LearningRates(task="x", plan="", own=0.1, is_field=True, ramp=ramp, curves=curves, advice=advice)


def test_the_plot_fits_a_terminal_and_the_file_is_json(alone: tuple) -> None:
    one = shown(alone[2], RAMP)
    lines = list(verb.plot(one))
    assert max(map(len, lines)) <= verb.COLUMNS + 11
    assert sum("•" in line for line in lines) > 3
    assert lines[-1].strip().startswith("loss: • seed 0, × seed 1")
    json.loads(json.dumps(one.as_json(), allow_nan=False))
    assert list(verb.plot(shown((verb.LossCurve(seed=0, lr=(), loss=(), diverged=True),), RAMP))) == []


def test_rates_go_from_the_lowest_to_the_highest_and_have_no_exponent_where_they_are_readable() -> None:
    steep = verb.Ramp(lowest=0.01, highest=1.0, steps=21)
    assert [steep.at(step, 0.1) for step in (0, 10, 20, 99)] == pytest.approx([0.01, 0.1, 1.0, 1.0])
    even = verb.Ramp(kind="linear", lowest=1.0, highest=3.0, steps=21)
    assert [even.at(step, 0.1) for step in (0, 10, 20)] == pytest.approx([1.0, 2.0, 3.0])
    assert verb.Ramp().ends(0.1) == pytest.approx((1e-4, 100.0))
    assert [verb.plain(rate) for rate in (1e-4, 0.0932, 100.0, 1e-7)] == ["0.0001", "0.093", "100", "1e-07"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"steps": 5}, "--steps=5: it must be at least 20"),
        ({"seeds": 0}, "--seeds=0"),
        ({"lowest": 0.0}, "--lowest=0.0: a learning rate is above 0"),
        ({"highest": float("inf")}, "--highest=inf"),
        ({"highest": float("nan")}, "--highest=nan"),
        ({"lowest": 1.0, "highest": 0.1}, "--lowest=1.0 is not below --highest=0.1"),
        ({"lowest": 1e6}, "give both --lowest and --highest"),
    ],
)
def test_what_is_no_ramp_is_refused(options: dict, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        verb.Ramp(**options).ends(0.1)


def test_groups_keep_their_proportion_and_the_task_all_else() -> None:
    task = Images(seed=3)
    other = verb.ramped(task, verb.Ramp(lowest=0.02, highest=2.0, steps=21))
    assert (other.seed, other.batch_size, type(other).__qualname__) == (3, task.batch_size, "Images")
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1)
    schedule = other.schedule(optimizer, 20)
    rates = []
    for _ in range(21):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx([0.02, 0.1])
    assert rates[-1] == pytest.approx([2.0, 10.0])
    still = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.0)
    with pytest.raises(TaskError, match="lr=0"):
        other.schedule(still, 20)


STEPS = 120
RATES = np.geomspace(1e-4, 10, STEPS)


def curve(seed: int = 0, falls_at: float = 0.01, rises_at: float = 0.5, scatter: float = 0.02) -> verb.LossCurve:
    """A loss of 2 that falls to 1 around `falls_at` and rises beyond `rises_at`, until it has diverged."""
    random = np.random.default_rng(seed)
    losses = 2 - 1 / (1 + (falls_at / RATES) ** 2) + (RATES / rises_at) ** 3 * 0.2
    losses += random.normal(0, scatter, STEPS)
    end = next((step for step, loss in enumerate(losses) if loss > 7), STEPS)
    return verb.LossCurve(seed=seed, lr=tuple(RATES[:end]), loss=tuple(losses[:end]), diverged=end < STEPS)


def test_the_band_is_where_the_loss_falls_fastest_and_where_it_turns() -> None:
    found = verb.advise([curve(seed) for seed in range(3)], STEPS)
    assert found.reason == ""
    assert 0.005 < found.band.steepest < 0.02
    assert 0.08 < found.band.largest_stable < 0.5
    assert found.band.steepest < found.band.suggested < found.band.largest_stable
    assert not found.band.reaches_the_end
    assert verb.advise([curve(rises_at=1e3)], STEPS).band.reaches_the_end


def test_smoothing_does_not_shift_and_the_noise_is_the_smoothed_curves() -> None:
    step = np.where(np.arange(STEPS) < 60, 2.0, 1.0)
    assert int(np.argmin(np.gradient(verb.smoothed(step, STEPS)))) in (59, 60)
    values = np.random.default_rng(0).normal(0, 0.1, 1000)
    assert verb.noise(values, 1000) == pytest.approx(float(verb.smoothed(values, 1000).std()), rel=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_gives_no_suggestion(seed: int) -> None:
    found = verb.advise([curve(seed, falls_at=1e9, rises_at=1e9, scatter=0.3)], STEPS)
    assert found.band is None
    assert "does not fall beyond its noise before the ramp ended" in found.reason
    assert "--highest" in found.reason


def test_what_only_rises_or_differs_between_seeds_gives_no_suggestion() -> None:
    found = verb.advise([curve(falls_at=1e9)], STEPS)
    assert "before it diverged" in found.reason
    assert "--lowest" in found.reason
    found = verb.advise([curve(0), curve(1, falls_at=3e-4, rises_at=0.01)], STEPS)
    assert found.band is None
    assert "the seeds disagree" in found.reason


def test_what_diverges_at_once_gives_no_suggestion() -> None:
    found = verb.band_of(verb.LossCurve(seed=0, lr=(1.0, 2.0), loss=(2.0, 5.0), diverged=True), STEPS)
    assert isinstance(found, str)
    assert "it diverged within 2 steps, from lr=1 on: give a smaller --lowest" in found
    assert "within 0 steps" in str(verb.band_of(verb.LossCurve(seed=0, lr=(), loss=(), diverged=True), STEPS))


def test_it_stops_at_what_is_not_finite_or_far_above_the_best() -> None:
    for last, stops in ((float("nan"), True), (float("inf"), True), (7.9, True), (3.0, False)):
        assert not verb.has_diverged([2.0, 1.9, 1.8])
        assert verb.has_diverged([2.0, 1.9, 1.8, last]) is stops
