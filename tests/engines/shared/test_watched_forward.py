"""Parameters that forward writes: kept as one process keeps them, or refused in the first step with the user's line."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import grappe
from grappe.checkpoint.format import list_checkpoints
from grappe.engines.shared.watched_forward import sets_before_reads, writes_seen
from grappe.plan import Plan
from grappe.private_api.torch import TorchDispatchMode
from tests.engines.shared.teachers import Distilled, Written
from tests.faults.resume_cell import hashes_of
from tests.faults.resuming import run
from tests.gallery.cell import runner
from tests.parity.cell import TOLERANCE, difference
from tests.parity.tasks import Images
from tests.processes import Pool

STEPS = 3


class Renormed(Written):
    """An embedding whose layer changes its own rows in forward."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(30, 6, max_norm=0.5), nn.Flatten(), nn.Linear(6, 4))

    def data(self, split: str, folder: Path) -> grappe.Arrays:
        return grappe.Arrays(torch.arange(29).unsqueeze(1), torch.arange(29) % 4)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model)


def train(pool: Pool, task: Distilled, plan: str) -> Any:
    return pool.run("tests.engines.shared.teachers:train", Plan.parse(plan).processes, task, plan, STEPS)[0]


@functools.cache
def plain(pool: Pool, way: str) -> Any:
    return train(pool, Distilled(way=way) if way == "nothing" else Written(way=way), "")


@pytest.mark.parametrize("way", ["forward", "forward_data"])
@pytest.mark.parametrize(
    "plan", ["replicate=2", "compile", "engine=textbook,replicate=2", "engine=lightning,replicate=2"]
)
def test_a_write_is_kept_once_a_step(pool: Pool, way: str, plan: str) -> None:
    alone, spread = plain(pool, way), train(pool, Written(way=way), plan)
    assert difference(alone["weights"], spread["weights"])[0] <= TOLERANCE
    # The teacher moves before each step, and so once more than after_step would with the same weights.
    assert difference(alone["weights"], plain(pool, "nothing")["weights"])[0] > 1e-3


@pytest.mark.parametrize("way", ["forward", "forward_data"])
@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("shard=2", "under shard=2 no process has all"),
        ("shard=2,zero=1", "under shard=2"),
        ("shard=2,offload=cpu", "under shard=2"),
        ("shard=2,compile", "under shard=2"),
        ("tensor=2", "under tensor=2"),
        ("microbatches=2", "under microbatches=2 forward runs several times"),
        ("recompute", "under recompute"),
        ("exact=2", "under exact=2"),
        ("engine=deepspeed,shard=2", "under shard=2"),
    ],
)
def test_a_write_that_would_be_lost_is_refused_with_the_name_and_the_line(pool, way, plan, words):
    said = train(pool, Written(way=way), plan)
    line = r"teachers.py, line \d+, in forward\(\): target"
    pattern = rf"the parameter 'teacher.0.weight' is written in forward \(.*{line}.*{words}.*after_step"
    assert re.match(f"TaskError: {pattern}", said), said


class Searched(Written):
    """An optimizer that runs the forward several times a step."""

    def optimizer(self, named_parameters):
        return torch.optim.LBFGS([parameter for _, parameter in named_parameters], lr=0.1, max_iter=3)


def test_an_optimizer_that_calls_a_closure_would_repeat_it(pool: Pool) -> None:
    said = train(pool, Searched(), "")
    assert "under LBFGS forward runs several times a step, and so would the change" in said


def test_a_value_of_a_process_s_own_samples_is_refused(pool: Pool) -> None:
    said = train(pool, Written(way="codebook"), "replicate=2")
    assert re.match("TaskError: the parameter 'teacher.2.bias' .*each process writes another", said), said
    assert "after_step" not in said  # which gets no samples


def test_a_layer_of_torch_that_writes_its_own_weight_is_seen_too(pool: Pool) -> None:
    assert train(pool, Renormed(), "")["losses"]
    assert "the parameter '0.weight' is written in forward" in train(pool, Renormed(), "shard=2")


def test_evaluations_do_not_move_it(pool: Pool, tmp_path: Path) -> None:
    for folder, every in (("seldom", STEPS), ("often", 1)):
        run(pool, Written(), "", tmp_path / folder, steps=STEPS, save_every=1, evaluate_every=every)
    seldom, often = (list_checkpoints(tmp_path / folder / "checkpoints") for folder in ("seldom", "often"))
    assert [one.step for one in seldom] == [one.step for one in often]
    for pair in zip(seldom, often, strict=True):
        assert len({json.dumps({**hashes_of(one), "json": ""}) for one in pair}) == 1


def test_verify_names_it(pool: Pool) -> None:
    plans = ["shard=2,threads=1,device=cpu", "replicate=2,threads=1,device=cpu"]
    sharded, replicated = grappe.verify(Written(), plans, run=runner(pool))
    assert sharded.verdict == "failed"
    assert "parameter 'teacher.0.weight' is written in forward" in sharded.causes[0]
    assert replicated.verdict == "same"
    assert "teacher.0.weight" in replicated.notes[0]


class Branched(nn.Module):
    """Two branches, each traced, which read a layer, a number and a hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 3), 2.0
        self.hidden: Any = (torch.ones(2, 3), torch.zeros(2, 3))

    def forward(self, x):
        output = torch.cond(x.sum() > 0, lambda x: self.layer(x) * self.factor, lambda x: x - self.hidden[0], (x,))
        self.last = output.detach()
        self.hidden = (self.last, self.last)
        return output


def test_branches_that_torch_traces_read_a_modules_attributes() -> None:
    model, x = Branched(), torch.ones(2, 3)
    with torch.no_grad(), writes_seen(model, lambda *_: None), sets_before_reads(model) as unread:
        output = model(x)
    assert torch.equal(output, model.layer(x) * 2.0)
    assert ("", "last") in unread
    # torch 2.8 traces branches without reading a module's tensors once more: what a branch alone reads is not seen.
    assert ("", "hidden") not in unread or not hasattr(TorchDispatchMode, "supports_higher_order_operators")


class DropsChannels(Images):
    """Drops channels, of which torch makes a mask in place."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(144, 5))


def test_a_model_that_draws_in_place_is_compiled(pool: Pool, tmp_path: Path) -> None:
    text = run(pool, DropsChannels(), "replicate=2,compile", tmp_path / "run", steps=2)
    assert "paused after --steps, 2 steps" in text
