"""RoundingTrial: the reference's steps with sums in other orders; their drift is what rounding alone explains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from grappe.verbs.verify.random_ops import RandomOps
from grappe.verbs.verify.reference_batches import Batch, Reorder
from grappe.verbs.verify.reference_model import ReferenceModel


class RoundingTrial:
    """The same training with the rows of each batch in other orders, and without random draws, which belong to rows.

    Rows move in pairs, since a task may mix pairs. If the model does not couple rows, they run through it in
    parts, else the gradients of partial sums of losses are added: some differences (of a bias whose gradient is
    only rounding, which Adam divides by its own size) appear only then. The loss gets all rows at once.

    Args:
        channels_last: whether the plan lays images out channels last, whose kernels add up in an order of their own.
        perturbed: whether to train further models too, whose initial parameters are moved by as much as a float32 is
            rounded. Another order reaches few of the places where rounding decides: a ReLU's input that is nearly 0.
    """

    def __init__(
        self,
        new_model: Callable[..., ReferenceModel],
        drawing: bool,
        independent_rows: bool,
        *,
        channels_last: bool,
        perturbed: bool,
    ) -> None:
        self._base = new_model() if drawing else None
        self._independent_rows = independent_rows
        self._others = [(order, new_model()) for order in ORDERS]
        if channels_last:
            self._others.append((AS_IT_IS, new_model(channels_last=True)))
        if perturbed:
            self._others += [(AS_IT_IS, _perturbed(new_model(), seed)) for seed in range(PERTURBED)]

    def step(
        self, number: int, batch: Batch, model: ReferenceModel, result: tuple[float, float]
    ) -> tuple[float, float, dict[str, float]]:
        """Computes the largest relative differences of loss, norm and each tensor, over the orders."""
        loss_noise = norm_noise = 0.0
        noise: dict[str, float] = {}
        with RandomOps(off=True):
            if self._base is not None:
                result = self._base.step(number, batch)
            base = (self._base or model).weights()
            for order, other in self._others:
                cut = {"parts": order.parts} if self._independent_rows else {"sums": order.sums}
                loss, norm = other.step(number, batch.reordered(order.reorder), **cut)
                loss_noise = max(loss_noise, relative(result[0], loss))
                norm_noise = max(norm_noise, relative(result[1], norm))
                for name, tensor in other.weights().items():
                    noise[name] = max(noise.get(name, 0.0), gap(base[name], tensor))
        return loss_noise, norm_noise, noise


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SummationOrder:
    """The order of summation in one of the other models."""

    reorder: Reorder
    parts: int
    sums: int


ORDERS = (
    _SummationOrder(reorder=lambda pairs: pairs[::-1], parts=2, sums=2),
    _SummationOrder(
        reorder=lambda pairs: pairs[len(pairs) // 2 :] + pairs[: len(pairs) // 2], parts=8, sums=3
    ),
)

PERTURBED = 4
"""Models with perturbed parameters."""
AS_IT_IS = _SummationOrder(reorder=lambda pairs: pairs, parts=1, sums=1)


@torch.no_grad()
def _perturbed(model: ReferenceModel, seed: int) -> ReferenceModel:
    """Moves each parameter at random by about its last bit."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.model.parameters():
        draws = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.mul_(1 + torch.finfo(torch.float32).eps * draws)
    return model


def relative(a: float, b: float) -> float:
    """Computes |a - b| / |a|; infinity if exactly one is not a number."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / (abs(a) or 1.0)
    return 0.0 if repr(a) == repr(b) else math.inf


def gap(a: Tensor, b: Tensor) -> float:
    """Computes |a - b| / |a| in norms."""
    a, b = a.double(), b.double()
    return 0.0 if torch.equal(a, b) else float((a - b).norm() / (a.norm() or 1.0))
