"""Tests that a checkpoint of two processes is one model for every reader: --from under any plan, load, evaluate."""

import shutil

import pytest
import torch

from grappe.checkpoint.foreign_training import Begin
from grappe.checkpoint.initial import build
from grappe.checkpoint.weights import named_tensors
from grappe.training.run import Run
from grappe.verbs.load import load
from tests.faults.conftest import PLANS, TASK


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_that_was_parted_is_taken_over_whole(recorded, tmp_path, plan: str) -> None:
    run = Run(shutil.copytree(recorded(plan).run, tmp_path / "run"))
    newest, model = run.latest(), load(run, TASK)
    assert newest is not None
    build(TASK, tmp_path / "new/checkpoints", Begin(source=run.folder))
    (tmp_path / "new/run.json").write_text("{}")
    begun = Run(tmp_path / "new").latest()
    first = begun.read_model()
    assert set(first) == set(newest.read_model()) == set(named_tensors(TASK.model()))
    for name, tensor in named_tensors(model).items():
        assert torch.equal(first.read(name), tensor), name
    with torch.no_grad():
        output = model(TASK.data("validation", tmp_path).inputs)
    assert output.isfinite().all()
    untrained = named_tensors(TASK.model())
    assert all(not torch.equal(tensor, untrained[name]) for name, tensor in named_tensors(model).items())
