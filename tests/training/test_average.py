"""Moving averages of weights under every kind of plan: saved, resumed, evaluated and loaded."""

from pathlib import Path

import pytest
import torch

from grappe import Task, load
from grappe.checkpoint.format import list_checkpoints
from grappe.errors import TaskError
from grappe.training.run import Run
from tests.faults import resuming
from tests.faults.resume_cell import hashes
from tests.parity.structured import StagedTexts
from tests.processes import Pool

END, DECAY = 4, 0.8
TASK = StagedTexts(ema=DECAY, samples=30, epochs=2)


SPREAD = """
replicate=2 shard=2 shard=2,zero=1,microbatches=2 exact=2,replicate=2 pipeline=2,microbatches=2
engine=textbook,replicate=2 engine=lightning
"""


def train(pool: Pool, task: Task, plan: str, run: Path, steps: int) -> None:
    if "lightning" in plan:
        pytest.importorskip("lightning")
    resuming.run(pool, task, plan, run, steps=steps, save_every=1)


@pytest.mark.parametrize("plan", ["", *SPREAD.split()])
def test_the_average_is_that_of_the_saved_weights_and_resumes_to_the_bit(pool: Pool, tmp_path: Path, plan: str) -> None:
    train(pool, TASK, plan, tmp_path / "whole", END)
    checkpoints = sorted(list_checkpoints(tmp_path / "whole" / "checkpoints"), key=lambda one: one.step)
    assert [one.step for one in checkpoints] == list(range(END + 1))
    first = checkpoints[0].read_model()
    averages = {name: first.read(name).clone() for name in first}
    for one in checkpoints[1:]:
        trained, averaged = one.read_model(), one.read_model(averaged=True)
        for name, average in averages.items():
            average.mul_(DECAY).add_(trained.read(name), alpha=1 - DECAY)
            torch.testing.assert_close(averaged.read(name), average, rtol=1e-6, atol=1e-7)
    train(pool, TASK, plan, tmp_path / "run", 2)
    train(pool, TASK, plan, tmp_path / "run", END)
    assert hashes(tmp_path / "run", END) == hashes(tmp_path / "whole", END)


def test_they_are_what_is_evaluated_and_loaded(pool: Pool, tmp_path: Path) -> None:
    train(pool, TASK, "shard=2", tmp_path / "run", 6)
    run = Run(tmp_path / "run")
    scored = [one for one in run.records() if one["kind"] == "evaluation"][-1]
    dataset = TASK.data("validation", tmp_path)
    inputs, targets = TASK.collate([dataset[index] for index in range(len(dataset))])
    losses = {}
    for trained in (False, True):
        model = load(run, TASK, trained=trained)
        losses[trained] = float(TASK.loss(TASK.forward(model, inputs), targets).mean())
    assert scored["loss"] == pytest.approx(losses[False], rel=1e-5)
    assert abs(losses[True] - losses[False]) > 1e-3


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0])
def test_a_decay_is_between_0_and_1(decay: float) -> None:
    with pytest.raises(TaskError, match="ema="):
        StagedTexts(ema=decay)
