"""The same curves under any plan; and nothing is left behind, nor anything of a run touched."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.training.task_reference import TaskReference
from grappe.verbs.lr_find.advice import LossCurve, advise
from grappe.verbs.lr_find.lr_find import COLUMNS, LearningRates, LRFindRequest, lr_find, plot, worker
from grappe.verbs.lr_find.ramp import Ramp
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
