"""The same curves under any plan; and nothing is left behind, nor anything of a run touched."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from grappe.errors import TaskError, UsageError
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.training.task_reference import TaskReference
from grappe.verbs.lr_find.advice import LossCurve, advise
from grappe.verbs.lr_find.lr_find import (
    COLUMNS,
    LearningRates,
    LRFindRequest,
    Ramp,
    lr_find,
    plot,
    ramped,
    worker,
)
from tests.faults.test_resume import run as train
from tests.parity.optimizers import TunedTokens
from tests.parity.tasks import Images
from tests.processes import Pool

RAMP = Ramp(steps=40, seeds=2)


def searched(process: ProcessRank, rendezvous_folder: Path, request: LRFindRequest) -> tuple:
    return worker(request, process, rendezvous_folder)


def found(
    pool: Pool, plan: str, task: Images, ramp: Ramp = RAMP
) -> tuple[float, bool, tuple[LossCurve, ...]]:
    wanted = Plan.parse(f"{plan},threads=1" if plan else "threads=1")
    request = LRFindRequest(task=TaskReference.of(task), plan=wanted, data=Path(), ramp=ramp)
    everyone = pool.run(f"{__name__}:searched", wanted.processes, request)
    assert all(one == everyone[0] for one in everyone), "the processes do not agree"
    return everyone[0]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> tuple[float, bool, tuple[LossCurve, ...]]:
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
        pool, "pipeline=2,microbatches=2", TunedTokens(by="schedule-free"), Ramp(steps=20, seeds=1)
    )
    assert len(curves[0].loss) > 10


def tree(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_a_run_is_not_touched_and_nothing_is_left(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(pool, Images(), "", tmp_path / "run", 3, save_every=2)
    before = tree(tmp_path)
    lr_find(Images(), "threads=1", ramp=Ramp(steps=20, seeds=1))
    assert tree(tmp_path) == before
    assert "resuming from step 2" in train(pool, Images(), "", tmp_path / "run", save_every=2)


def shown(curves: tuple[LossCurve, ...], ramp: Ramp) -> LearningRates:
    advice = advise(curves, ramp.steps)
    return LearningRates(task="x", plan="", own=0.1, is_field=True, ramp=ramp, curves=curves, advice=advice)


def test_the_plot_fits_a_terminal_and_the_file_is_json(alone: tuple) -> None:
    one = shown(alone[2], RAMP)
    lines = list(plot(one))
    assert max(map(len, lines)) <= COLUMNS + 11
    assert sum("•" in line for line in lines) > 3
    json.loads(json.dumps(one.as_json(), allow_nan=False))
    assert list(plot(shown((LossCurve(seed=0, lr=(), loss=(), diverged=True),), RAMP))) == []


def test_it_goes_from_the_lowest_to_the_highest() -> None:
    steep = Ramp(lowest=0.01, highest=1.0, steps=21)
    assert [steep.at(step, 0.1) for step in (0, 10, 20, 99)] == pytest.approx([0.01, 0.1, 1.0, 1.0])
    even = Ramp(kind="linear", lowest=1.0, highest=3.0, steps=21)
    assert [even.at(step, 0.1) for step in (0, 10, 20)] == pytest.approx([1.0, 2.0, 3.0])
    assert Ramp().ends(0.1) == pytest.approx((1e-4, 100.0))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"steps": 5}, "--steps=5: it must be at least 20"),
        ({"seeds": 0}, "--seeds=0"),
        ({"lowest": 0.0}, "--lowest=0.0: a learning rate is above 0"),
        ({"highest": float("inf")}, "--highest=inf"),
        ({"highest": float("nan")}, "--highest=nan"),
        ({"lowest": 1.0, "highest": 0.1}, "--lowest=1.0 is not below --highest=0.1"),
    ],
)
def test_what_is_no_ramp_is_refused(options: dict, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        Ramp(**options)
    assert told in str(refused.value)


def test_a_lowest_above_the_default_highest_is_refused() -> None:
    with pytest.raises(UsageError, match="give both --lowest and --highest"):
        Ramp(lowest=1e6).ends(0.1)


def test_groups_keep_their_proportion_and_the_task_all_else() -> None:
    task = Images(seed=3)
    other = ramped(task, Ramp(lowest=0.02, highest=2.0, steps=21))
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


def test_a_learning_rate_of_zero_is_named() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.0)
    with pytest.raises(TaskError, match="lr=0"):
        ramped(Images(), Ramp()).schedule(optimizer, 20)
