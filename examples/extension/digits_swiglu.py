"""A gated perceptron on handwritten digits, with an operator in C++: train it as any task, under any plan.

pip install --no-build-isolation examples/extension
grappe train examples/extension/digits_swiglu.py --plan replicate=2
"""

from __future__ import annotations

from collections.abc import Mapping

from swiglu import swiglu, swiglu_in_python
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from grappe.tasks.digits import Digits


class Gated(nn.Module):
    """Maps [B, inside] to [B, outside]: two layers, of which one gates the other, and a third."""

    def __init__(self, inside: int, hidden: int, outside: int, *, python: bool) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(inside, hidden), nn.Linear(inside, hidden)
        self.down = nn.Linear(hidden, outside)
        self.swiglu = swiglu_in_python if python else swiglu

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.swiglu(self.gate(x), self.value(x)))


class DigitsSwiGLU(Digits):
    """Two gated layers on scikit-learn's handwritten digits."""

    width: int = 128
    python: bool = False  # torch's own operators, to compare with

    def model(self) -> nn.Module:
        first = nn.Sequential(nn.Flatten(), Gated(64, self.width, 64, python=self.python))
        return nn.Sequential(first, Gated(64, self.width, 10, python=self.python))

    def tensor_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle]:
        """Elementwise: each process has its columns of both layers, and computes with those."""
        styles: dict[str, ParallelStyle] = {}
        for name in ("0.1", "1"):
            styles |= {f"{name}.gate": ColwiseParallel(), f"{name}.value": ColwiseParallel()}
            styles[f"{name}.down"] = RowwiseParallel()
        return styles
