"""Whether every step reaches the same parameters."""

import pytest
import torch

from grappe.contrib.deepspeed.model import Reached
from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from tests.parity.ways import Ways

ALONE = World(process=ProcessRank(rank=0, size=1, local_rank=0, local_size=1, job="x"), device=torch.device("cpu"))
ODD, EVEN = torch.tensor([[1, 2]]), torch.tensor([[2, 1]])


def step(model: Ways, *microbatches: torch.Tensor) -> None:
    for tokens in microbatches:
        model(tokens).sum().backward()


def test_a_later_step_that_reaches_less_is_refused_before_anything_moves() -> None:
    model = Ways(both=False)
    reached = Reached(model, 1, ALONE)
    step(model, ODD, EVEN)
    reached.check()
    step(model, EVEN, ODD)
    reached.check()
    step(model, ODD, ODD)
    with pytest.raises(
        TaskError,
        match=r"first step's reach b.weight, b.bias, but not both. DeepSpeed has zero gradients",
    ):
        reached.check()


def test_what_no_sample_reaches_is_named() -> None:
    model = Ways(both=False)
    reached = Reached(model, 1, ALONE)
    step(model, ODD)
    with pytest.raises(TaskError, match=r"the loss does not depend on b.weight, b.bias: DeepSpeed would"):
        reached.check()


def test_evaluation_reaches_nothing() -> None:
    model = Ways(both=True)
    reached = Reached(model, 3, ALONE)
    for _ in range(2):
        step(model, ODD)
        with torch.no_grad():
            model(EVEN)
        reached.check()


def test_a_parameter_that_is_reached_once_more_often_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    two = World(process=ProcessRank(rank=0, size=2, local_rank=0, local_size=2, job="x"), device=torch.device("cpu"))
    monkeypatch.setattr(World, "gather", lambda self, value: [value])
    model = Ways(both=True)
    reached = Reached(model, 2, two)
    step(model, ODD)
    reached.check()
    step(model, ODD, ODD)
    with pytest.raises(TaskError, match=r"reach .* once more often in one of them. DeepSpeed sums gradients"):
        reached.check()
