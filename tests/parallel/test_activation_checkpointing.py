"""Activation checkpointing of units that write buffers or attributes in forward: the second forward writes nothing."""

import pytest
import torch
from torch import Tensor, nn

from grappe.errors import TaskError
from grappe.parallel.activation_checkpointing import checkpoint_activations
from grappe.plan import Plan


class Remembers(nn.Module):
    """A block that writes a codebook, a running count, a cache and its own generator in forward."""

    def __init__(self, late: int = 0) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("mask", torch.ones(4))
        self.seen, self.late, self.cache = 0, late, {}
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        if self.late and self.seen > self.late:
            self.mask.mul_(0.5)
        z = self.norm(self.into(x)) * torch.rand(len(x), 1, generator=self.generator)
        self.codes.mul_(0.5).add_(z.detach().mean(0))
        held = self.cache.get("held", torch.zeros(2))
        y = self.out(z @ self.codes.T @ self.codes * self.mask) * self.seen + held
        self.cache["held"] = y.detach().mean(0)
        return y


def _trained(*, recompute: bool, late: int = 0) -> tuple[Remembers, list[Tensor | None]]:
    torch.manual_seed(0)
    block = Remembers(late)
    if recompute:
        checkpoint_activations([block], Plan(recompute=True))
    for _ in range(3):
        block(torch.randn(6, 3)).square().sum().backward()
    return block, [parameter.grad for parameter in block.parameters()]


def test_a_second_forward_sees_the_state_that_the_first_saw_and_leaves_what_that_left():
    plain, gradients = _trained(recompute=False)
    recomputed, others = _trained(recompute=True)
    torch.testing.assert_close(others, gradients, rtol=0, atol=0)
    torch.testing.assert_close(dict(recomputed.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)
    assert recomputed.seen == plain.seen == 18
    assert torch.equal(recomputed.cache["held"], plain.cache["held"])
    assert torch.equal(recomputed.generator.get_state(), plain.generator.get_state())


def test_what_a_forward_begins_to_change_later_is_refused():
    with pytest.raises(TaskError, match=r"changes 'mask' now, and .* without recompute"):
        _trained(recompute=True, late=6)
