"""Random numbers of a forward and a loss are the samples' own, under every plan."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import grappe
from grappe.plan import Plan
from tests.parity.test_native import assert_learned_alike
from tests.processes import Pool

STEPS = 6


class Blurred(nn.Module):
    """A layer with noise before and behind it."""

    def __init__(self, width: int, salt: int) -> None:
        super().__init__()
        self.linear, self.salt = nn.Linear(width, width), salt

    def forward(self, x: Tensor) -> Tensor:
        x = x * (grappe.rand_like(x, salt=self.salt) < 0.8)
        return torch.tanh(self.linear(x)) + 0.5 * grappe.randn_like(x, salt=self.salt)


class Noisy(grappe.Task):
    """A denoising regression, whose target is blurred in the loss."""

    epochs: int = 3
    batch_size: int = 12

    def model(self) -> nn.Module:
        return nn.Sequential(*(Blurred(6, salt) for salt in range(4)), nn.Linear(6, 3))

    def units(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, nn.Sequential)
        return list(model)

    def data(self, split: str, folder: Path) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(29, 6, generator=generator), torch.randn(29, 3, generator=generator))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        blurred = target + 0.3 * grappe.randn_like(target, salt=9)
        return F.mse_loss(output, blurred, reduction="none").mean(1)

    def optimizer(self, named):
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)


PLANS = [
    "microbatches=3",
    "replicate=2",
    "replicate=3,microbatches=2",
    "replicate=2,microbatches=2,recompute",
    "shard=2",
    "shard=2,zero=2,microbatches=2,recompute",
    "exact=4",
    "pipeline=2,microbatches=4",
    "pipeline=2,microbatches=4,schedule=gpipe",
    "pipeline=2,microbatches=4,recompute",
    "pipeline=2,stages=2,microbatches=4,schedule=interleaved,recompute",
    "pipeline=2,microbatches=4,schedule=zero_bubble",
    "pipeline=2,microbatches=2,replicate=2",
    "pipeline=2,microbatches=2,shard=2",
    "compile,replicate=2",
    "engine=textbook,replicate=3",
    "engine=textbook,exact=4",
    "engine=lightning,replicate=2,microbatches=2",
    "engine=lightning,shard=2,recompute",
    "engine=deepspeed,replicate=2,microbatches=2",
    "engine=deepspeed,shard=2,recompute",
    "engine=horovod,replicate=2,microbatches=2",
]


def train(pool: Pool, plan: str) -> list[dict]:
    return pool.run("tests.parity.cell:train", Plan.parse(plan).processes, Noisy(), plan, STEPS)


@functools.cache
def alone(pool: Pool) -> dict:
    return train(pool, "")[0]


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_draws_the_same(pool: Pool, plan: str) -> None:
    wanted, found = alone(pool), train(pool, plan)
    assert_learned_alike(found, wanted, plan)
    for one in found:
        assert one["scores"].loss == pytest.approx(wanted["scores"].loss, rel=1e-5)


@pytest.mark.parametrize("plan", ["exact=4,replicate=2", "exact=4,shard=2"])
def test_the_same_bits(pool: Pool, plan: str) -> None:
    wanted, found = train(pool, "exact=4")[0], train(pool, plan)[0]
    assert found["losses"] == wanted["losses"]
    assert all(tensor.equal(found["weights"][name]) for name, tensor in wanted["weights"].items())
