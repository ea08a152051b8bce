"""Optimizers under kills: those of whole parameters, and those that evaluate and save other weights than they train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import grappe
from grappe.training.run import Run
from tests.faults.resume_cell import curves, hashes
from tests.faults.test_resume import STEPS, run
from tests.parity import reference
from tests.parity.cell import TOLERANCE, difference
from tests.parity.optimizers import TunedImages, TunedTokens
from tests.processes import Pool


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        ("lars", "shard=2,zero=1"),
        ("lamb", "shard=3"),
        ("muon", "shard=2"),
        ("schedule-free", ""),
        ("schedule-free", "shard=2"),
        ("schedule-free", "engine=lightning,replicate=2"),
        ("schedule-free", "engine=deepspeed,replicate=2"),
        ("lbfgs", "replicate=2"),
        ("lbfgs", "shard=2"),
        ("sam", ""),
        ("sam", "shard=2"),
    ],
)
def test_the_same_plan_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path, rule: str, plan: str) -> None:
    task = TunedImages(by=rule, batchnorm=True, dropout=0.3, clip=0.5)
    run(pool, task, plan, tmp_path / "whole", save_every=2)
    run(pool, task, plan, tmp_path / "parts", 5, save_every=2)
    assert "resuming from step 4" in run(pool, task, plan, tmp_path / "parts", save_every=2)
    assert hashes(tmp_path / "parts", STEPS) == hashes(tmp_path / "whole", STEPS)
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")


def weights(folder: Path, prefix: str = "model.", ending: str = "") -> dict[str, torch.Tensor]:
    found = Run(folder).latest()
    tensors = found.read_tensors()
    names = [name for name in tensors if name.startswith(prefix) and name.endswith(ending)]
    return {name.removeprefix(prefix).removesuffix(ending): tensors.read(name) for name in names}


@pytest.mark.parametrize("rule", ["lamb", "muon", "schedule-free"])
@pytest.mark.parametrize(
    ("before", "after"), [("shard=3", "pipeline=2,microbatches=4"), ("pipeline=2,microbatches=4", "shard=2")]
)
def test_another_world_goes_on_with_the_same_weights(pool, tmp_path, rule, before, after):
    task = TunedTokens(by=rule)
    check_another_world(pool, tmp_path, task, before, after)


def check_another_world(pool: Pool, tmp_path: Path, task: TunedTokens | TunedImages, before: str, after: str) -> None:
    run(pool, task, "", tmp_path / "one", save_every=2)
    run(pool, task, before, tmp_path / "run", 3, save_every=2)
    assert "resuming from step 2" in run(pool, task, after, tmp_path / "run", save_every=2)
    gap, name = difference(weights(tmp_path / "one"), weights(tmp_path / "run"))
    assert gap <= TOLERANCE, name


@pytest.mark.parametrize("rule", ["lbfgs", "sam"])
def test_closures_go_on_in_another_world(pool: Pool, tmp_path: Path, rule: str) -> None:
    task = TunedImages(by=rule, batch_size=29, epochs=4, scheduled=False)
    check_another_world(pool, tmp_path, task, "replicate=2", "shard=2")


@pytest.mark.parametrize("plan", ["", "shard=2", "pipeline=2,microbatches=4"])
def test_what_is_evaluated_saved_and_loaded_is_not_what_is_trained(pool: Pool, tmp_path: Path, plan: str) -> None:
    task = TunedTokens(by="schedule-free")
    run(pool, task, plan, tmp_path / "run", evaluate_every=1, save_every=2)
    trained = weights(tmp_path / "run", "optimizer.", ".trained_weight")
    evaluated = {name: tensor for name, tensor in weights(tmp_path / "run").items() if name in trained}
    wanted = reference.train(task, STEPS)["weights"]
    assert difference(wanted, trained)[0] <= TOLERANCE, "evaluations changed what is learned"
    assert difference(wanted, evaluated)[0] > 100 * TOLERANCE
    model = grappe.load(Run(tmp_path / "run"), task)
    assert difference(evaluated, dict(model.state_dict()))[0] == 0
    dataset = task.data("validation", tmp_path)
    with torch.no_grad():
        values, counts = task.loss(model(dataset.inputs), dataset.targets), task.counts(dataset.targets)
    *_, last = Run(tmp_path / "run").records("evaluation")
    assert last["loss"] == pytest.approx(float((values * counts).sum() / counts.sum()), rel=1e-5)
    outputs = torch.stack(list(grappe.predict(Run(tmp_path / "run"), dataset.inputs, task=task)))
    torch.testing.assert_close(outputs, model(dataset.inputs).detach())
