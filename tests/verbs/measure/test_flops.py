"""Counted operations are those of the formulas."""

from pathlib import Path

import torch
from torch import nn

from grappe import Arrays
from grappe.plan import Plan
from grappe.tasks.digits import Digits
from grappe.tasks.pysource import PySource
from grappe.verbs.measure import flops


def convolution(before: int, after: int, kernel: int, side: int) -> int:
    """Multiplications and additions of one image's convolution to side x side."""
    return 2 * before * kernel**2 * after * side**2


def test_lenet() -> None:
    task = Digits()
    layers = [convolution(1, 16, 3, 8), convolution(16, 32, 3, 8), 2 * 512 * 128, 2 * 128 * 10]
    # Backward makes a gradient of the weights and one of the inputs; nobody asks for that of the image.
    assert flops.per_sample(task, task.data("train", Path())) == 3 * sum(layers) - layers[0]


def test_gpt() -> None:
    """Kaplan et al. (2020), "Scaling laws for neural language models": 6 per parameter and token, and attention."""
    width, depth, context = 64, 3, 32
    task = PySource(width=width, depth=depth, context=context, heads=2, megabytes=0.1)
    matrices = 12 * width**2 * depth + width * 256
    attention = 2 * 2 * context * width * depth
    assert flops.per_sample(task, task.data("train", Path())) == 3 * context * (2 * matrices + attention)


class Curious(nn.Module):
    """Looks at values, so that it cannot be counted without any."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum().item() < 1e9 else x


def test_a_model_that_looks_at_values_is_counted_on_real_ones() -> None:
    class Looks(Digits):
        def model(self) -> nn.Module:
            return Curious()

    points = Arrays(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))
    assert flops.per_sample(Looks(), points) == 2 * 2 * 16  # forward, and the weights' gradient


def test_what_a_device_reaches_is_measured() -> None:
    assert flops.reachable(torch.device("cpu"), Plan()) > 1e8
