"""Tests of verify's switches: modules that couple a batch's samples are found, and random draws give their mean."""

import pytest
import torch
from torch import nn

from grappe.data.batch import BatchRows
from grappe.data.whole_batch_draws import whole_batch_draws
from grappe.verbs.verify.instrument import batch_coupling
from grappe.verbs.verify.random_ops import RandomOps
from tests.parity.planted import Whitening

ROWS = 12


class Steps(nn.Module):
    """A layer that has the steps of a sequence first and the batch second, as many of each."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.stack([x * (step + 1) for step in range(ROWS)])
        output = self.layer(steps)
        return (output[0] if isinstance(output, tuple) else output).mean(0)


class Functional(nn.Module):
    """A batch normalisation that is no module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)


def found(module: nn.Module) -> tuple[dict[str, str], bool]:
    torch.manual_seed(0)
    model, samples = nn.Sequential(nn.Linear(8, 8), module), torch.randn(ROWS, 8)
    return batch_coupling(model, lambda made, inputs: made(inputs), lambda first, end: samples[first:end], ROWS)


@pytest.mark.parametrize(
    "module",
    [
        nn.GroupNorm(2, 8),
        nn.Dropout(0.5),
        Steps(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)),
        Steps(nn.LSTM(8, 8, 2, dropout=0.2)),
    ],
)
def test_what_leaves_samples_independent_is_not_taken_for_coupled(module: nn.Module) -> None:
    assert found(module) == ({}, True)


def test_what_couples_samples_is_found_whether_evaluation_stops_it_or_not() -> None:
    assert found(nn.BatchNorm1d(8)) == ({"1": "BatchNorm1d"}, False)
    (line, function), *_ = (by_line := found(Whitening())[0]).items()
    assert line.startswith("planted.py:") and function == "mean" and len(by_line) == 1
    assert found(Functional()) == ({"": "Sequential"}, False)


def test_cudnns_preparation_of_dropout_is_left_alone() -> None:
    """cuDNN takes the rate, and refuses 0: an LSTM with dropout could not be verified on a GPU."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    seen: list[float] = []

    def prepared(dropout: float, train: bool, seed: int, **options: object) -> torch.Tensor:
        seen.append(dropout)
        return torch.empty(1, dtype=torch.uint8, device="meta")

    library.impl("_cudnn_init_dropout_state", prepared)
    with RandomOps(off=True):
        torch.ops.aten._cudnn_init_dropout_state(0.2, True, 1, dtype=torch.uint8, device="meta")
    assert seen == [0.2]


@pytest.mark.parametrize("rows", [None, BatchRows(2, 4, 8)])
def test_a_gpus_dropout_that_is_off_keeps_values_and_gradients(rows: BatchRows | None) -> None:
    """On a GPU autograd keeps the rate for the backward, and a microbatch draws a mask for the whole batch."""
    x = torch.rand(4, 8, requires_grad=True)
    with RandomOps(off=True), whole_batch_draws(rows):
        output = torch.native_dropout(x, 0.5, True)[0]
        output.sum().backward()
    assert torch.equal(output, x)
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))
    with whole_batch_draws(rows):
        assert not torch.equal(torch.native_dropout(x, 0.5, True)[0], x)


def test_a_normalisation_that_begins_at_zero_is_found() -> None:
    layer = nn.BatchNorm1d(8)
    nn.init.zeros_(layer.weight)
    assert found(layer) == ({"1": "BatchNorm1d"}, False)
    assert not layer.weight.any(), "the model itself is left alone"


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: nn.functional.alpha_dropout(x, 0.5, training=True),
        lambda x: nn.functional.rrelu(x - 2, training=True),
        nn.functional.gumbel_softmax,
        lambda x: torch.randn_like(x) + torch.rand(3, 4) + torch.randint(0, 9, (3, 4)),
        lambda x: torch.normal(x, 1.0) + torch.normal(0.0, 1.0, (3, 4)),
        lambda x: x.clone().exponential_() + x.clone().geometric_(0.5) + x.clone().cauchy_(),
        lambda x: x.clone().log_normal_() + x.clone().random_(5) + x.clone().bernoulli_(),
        lambda x: torch.poisson(x) + torch.multinomial(x, 4) + torch.bernoulli(x / 9),
        lambda x: torch.binomial(torch.full_like(x, 5), x / 9) + torch.randperm(4),
    ],
)
def test_draws_that_are_switched_off_are_the_same_each_time(draw) -> None:
    x = torch.rand(3, 4) + 1
    assert not torch.equal(draw(x), draw(x))
    with RandomOps(off=True) as random_ops:
        assert torch.equal(draw(x), draw(x))
    assert random_ops.seen
