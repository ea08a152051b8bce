"""Gradients in buckets: those of one process, whatever a script's hooks do to them while a backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grappe.rows.context import RowsContext
from grappe.rows.entries import entries
from grappe.rows.gradients import GradientSums
from grappe.rows.own import as_own, as_rows
from grappe.rows.plans import activate
from grappe.rows.tensor import Rows, full, split
from grappe.training.interception import replaced
from tests.rows.world import World

Backward = Callable[[Tensor], None]
Form = Callable[[nn.Sequential, Tensor, Backward], Any]


def usual(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    backward(net(value).square().mean())


def accumulated(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    for part in (value, value.tanh()):
        backward(net(part).square().mean())


def in_two_dtypes(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    net[2].float()
    backward(net[4](net[2](net[0](value).float()).double()).square().mean())


def scaled_by_a_later_hook(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    def halve(*_: Any) -> None:
        for each in net[4].parameters():
            each.grad.mul_(0.5)

    net[0].register_full_backward_hook(halve)
    backward(net(value.requires_grad_()).square().mean())


def stepped_within(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    def step(weight: Tensor) -> None:
        with torch.no_grad():
            weight -= 0.1 * weight.grad.clamp(-0.01, 0.01)  # type: ignore[union-attr]
        weight.grad = None

    for each in net[2].parameters():
        each.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        backward(net(value).square().mean())


def clamped_within(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    def clamp(weight: Tensor) -> None:
        weight.grad.clamp_(-0.001, 0.001)  # type: ignore[union-attr]

    usual(net, value, backward)
    for each in net.parameters():
        each.grad = None
        each.register_post_accumulate_grad_hook(clamp)
    usual(net, value, backward)


def twice_through_a_layer(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    made = checkpoint(net, value.requires_grad_(), use_reentrant=True)
    backward(made.square().mean() + net(value).mean())


def with_a_penalty(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    """Parameters that own rows meet, and that the loss takes as they are."""
    backward(net(value).square().mean() + 0.1 * sum(each.square().sum() for each in net.parameters()))


def tied(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    net[2].weight = nn.Parameter(net[2].weight + 0.1)
    net[3] = nn.Linear(20, 20).double()
    net[3].weight = net[2].weight
    backward(net(value).square().mean() + net[2](net[0](value)).mean())


def hooked_after_the_forward(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    loss = net(value).square().mean()
    net[2].weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001))

    def halve(weight: Tensor) -> None:
        weight.grad.mul_(0.5)  # type: ignore[union-attr]

    net[4].weight.register_post_accumulate_grad_hook(halve)
    backward(loss)


def scaled_by_a_hook_on_an_activation(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    def halve(_: Tensor) -> None:
        for each in net[4].parameters():
            each.grad.mul_(0.5)  # type: ignore[union-attr]

    def hook(_: nn.Module, __: Any, made: Tensor) -> None:
        made.register_hook(halve)

    net[2].register_forward_hook(hook)
    backward(net(value).square().mean())


def some_inputs(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    net(value).square().mean().backward(inputs=[net[2].weight])
    net[2].weight.grad = full(net[2].weight.grad)


def asked_for(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    """A step by hand, then gradients of gradients."""
    grads = torch.autograd.grad(net(value).square().mean(), list(net.parameters()))
    with torch.no_grad():
        for each, grad in zip(net.parameters(), grads, strict=True):
            each.sub_(0.1 * full(grad))
    value = value.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(value).sum(), value, create_graph=True)
    grads = torch.autograd.grad(net(value).mean(), list(net.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(net(value).sum(), [value, net[2].weight.detach().requires_grad_()])
    backward((slope.norm(dim=1) - 1).square().mean() + sum(each.square().sum() for each in grads))


def asked_for_by_name(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    named = dict(net.named_parameters())
    try:
        grads: Any = torch.autograd.grad((named["0.weight"] * 2).sum(), {"0.weight": named["0.weight"]})
    except (TypeError, AttributeError):
        usual(net, value, backward)  # before torch 2.13 there are no names
        return
    grads = torch.autograd.grad(net(value).square().mean() + named["0.weight"].square().mean(), named)
    assert list(grads) == list(named)
    for name, each in named.items():
        each.grad = full(grads[name])


def moved_weights(net: nn.Sequential, value: Tensor, backward: Backward) -> None:
    """Memory that is another one after a first step."""
    usual(net, value, backward)
    for each in net.parameters():
        each.data = each.data * 2
    usual(net, value, backward)


FORMS = {each.__name__: each for each in (
    usual, accumulated, in_two_dtypes, scaled_by_a_later_hook, stepped_within, clamped_within, twice_through_a_layer,
    with_a_penalty, tied, hooked_after_the_forward,
    scaled_by_a_hook_on_an_activation, some_inputs, asked_for, asked_for_by_name, moved_weights,
)}  # fmt: skip


class Within(nn.Sequential):
    """Layers that run on own rows."""

    def forward(self, value: Tensor) -> Any:
        return as_rows(super().forward(as_own(value)))


def trained(
    form: Form,
    make: Callable[[Tensor], Tensor],
    backward: Callable[[nn.Module, Tensor], None],
    kind: type[nn.Sequential] = nn.Sequential,
) -> list[Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)]
    net = kind(*layers).double()
    value = make(torch.randn(7, 3, dtype=torch.float64))
    form(net, value, lambda loss: backward(net, loss))
    assert not any(type(each.grad) is Rows for each in net.parameters())
    return [tensor for each in net.parameters() for tensor in (each.detach(), each.grad) if tensor is not None]


def on_a_process(rank: int) -> Callable[[tuple[str, int, bool]], list[Any]]:
    def work(piece: tuple[str, int, bool]) -> list[Any]:
        name, size, within = piece
        sums = GradientSums(first=size, most=2 * size)

        def backward(net: nn.Module, loss: Tensor) -> None:
            sums.backward(list(net.parameters()), loss.backward)

        context = RowsContext(rank=rank, size=2)
        if within:
            context.twin = sums.twin
        with activate(context), replaced(*entries(sums)):
            return trained(FORMS[name], split, backward, Within if within else nn.Sequential)

    return work


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(2, on_a_process)
    yield made
    made.close()


@pytest.mark.parametrize("within", [False, True], ids=["rows", "within a module"])
@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_one_process(name: str, size: int, within: bool, world: World) -> None:
    alone = trained(FORMS[name], lambda value: value, lambda net, loss: loss.backward())
    for process in world.run((name, size, within)):
        for whole, own in zip(alone, process, strict=True):
            # fp32 rounds each process's term, and float64 gradients that pass through an fp32 layer.
            tolerated = 1e-12 if all(each.dtype == torch.float64 for each in alone) else 1e-6
            torch.testing.assert_close(own, whole, rtol=tolerated, atol=tolerated)
