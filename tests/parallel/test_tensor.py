"""Splitting layers over the tensor axis: convolutions by their channels, as the book says, and the shipped tasks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grappe import Arrays
from grappe.errors import PlanError
from grappe.parallel.tensor import SplitOutputs, split_convolutions
from grappe.tasks.cifar10 import Cifar10
from grappe.tasks.coatnet import CoAtNet
from grappe.tasks.digits import Digits
from tests.parity import reference
from tests.parity.cell import TOLERANCE, difference
from tests.parity.test_native import STEPS, check
from tests.processes import Pool


class FewPhotos(Cifar10):
    """CIFAR-10's shapes, without its files."""

    batch_size: int = 12

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(5)
        images = torch.randn(29, 3, 32, 32, generator=generator)
        return Arrays(images, torch.randint(0, 10, (29,), generator=generator))


class FewDigits(Digits):
    """Digits in few channels, without a transform, which the reference has not."""

    def data(self, split: str, folder: Path) -> Arrays:
        return grey(29, 8)


class FewTokens(CoAtNet):
    """CoAtNet's smallest, on the smallest images."""

    side: int = 16
    batch_size: int = 8

    def data(self, split: str, folder: Path) -> Arrays:
        return grey(16, self.side)

    def optimizer(self, named_parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(named_parameters, lr=0.01)  # AdamW blows rounding up


def grey(samples: int, side: int) -> Arrays:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(samples, 1, side, side, generator=generator)
    return Arrays(images, torch.randint(0, 10, (samples,), generator=generator))


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        (FewPhotos(), "tensor=2"),
        (FewPhotos(optimizer_="adam", lr=0.001, clip=0.5), "tensor=2,shard=2"),
        (FewPhotos(clip=0.5), "tensor=2,replicate=2,channels_last"),
        (FewPhotos(), "engine=lightning,tensor=2"),
        (FewDigits(batch_size=12), "tensor=4"),
    ],
)
def test_split_channels_learn_the_same(pool: Pool, task: Cifar10 | Digits, plan: str) -> None:
    check(pool, task, plan, reference.train(task, STEPS))


@pytest.mark.slow
def test_attention_beside_convolutions_learns_the_same(pool: Pool) -> None:
    task = FewTokens()
    found = pool.run("tests.parity.cell:train", 2, task, "tensor=2", 2)[0]
    plain = reference.train(task, 2)["weights"]
    # What batch normalisation takes away again is 0 but for rounding: biases before it, means behind it.
    told = [name for name, tensor in plain.items() if tensor.float().square().mean().sqrt() > 1e-4]
    assert len(told) > len(plain) / 2
    gap, name = difference(*({name: weights[name] for name in told} for weights in (plain, found["weights"])))
    assert gap <= TOLERANCE, f"{name} is {gap:.1e} away"


def test_channels_that_do_not_divide_are_refused(pool: Pool) -> None:
    [*words] = pool.run("tests.engines.told:told", 4, FewPhotos(), "tensor=4", 1)
    assert all("tensor=4: Conv2d(3, 6" in text and "take a divisor" in text for text in words)


class Standardised(nn.Conv2d):
    """A convolution with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(input, weight, self.bias)


@pytest.mark.parametrize(
    "layer",
    [
        Standardised(2, 4, 3),
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(2, 4, 3, groups=2),
        nn.ConvTranspose2d(2, 4, 3),
    ],
)
def test_a_layer_that_computes_something_else_is_refused(layer: nn.Module) -> None:
    mesh: Any = SimpleNamespace(size=lambda: 2)
    assert not split_convolutions(nn.Sequential(layer))
    with pytest.raises(PlanError, match=type(layer).__name__):
        SplitOutputs()._apply(layer, mesh)
