"""Modules on own rows: hooks, writes, kept tensors, copies and user Functions give the numbers of one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from grappe.errors import GrappeError
from grappe.rows.context import RowsContext
from grappe.rows.entries import entries
from grappe.rows.gradients import GradientSums
from grappe.rows.own import as_own, as_rows
from grappe.rows.plans import activate
from grappe.rows.tensor import full, split
from grappe.training.interception import replaced
from tests.rows.world import World

ROWS = 7


class Cube(torch.autograd.Function):
    """A user's function, whose backward joins rows."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (value,) = ctx.saved_tensors
        return 3 * grad * value**2 * grad.abs().mean()


class Net(nn.Module):
    """A model whose forward does `what` to the hidden rows."""

    def __init__(self, what: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.what = what
        self.kept: Any = None
        self.seen = 0

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.what(self, self.first(value)))


def with_own_function(net: Net, x: Tensor) -> Tensor:
    return Cube.apply(x.tanh())


def with_vmap(net: Net, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * row.sum())(x)


def with_vmap_over_weights(net: Net, x: Tensor) -> Tensor:
    """Rows that the function takes from around it."""
    scaled = torch.vmap(lambda row: (x * row, (x @ row).sum()))(net.last.weight)
    return scaled[0].sum(0) + scaled[1].mean()


def with_grad_of_func(net: Net, x: Tensor) -> Tensor:
    return torch.func.grad(lambda value: value.sin().sum())(x)


def with_checkpoint(net: Net, x: Tensor) -> Tensor:
    return checkpoint(
        lambda value: F.gelu(F.linear(value, net.first.weight.new_ones(6, 6)) * net.first.bias), x, use_reentrant=False
    )


def with_hook(net: Net, x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad / grad.norm())
    return x.relu()


def with_counts(net: Net, x: Tensor) -> Tensor:
    net.seen += len(x) + x.shape[0] + x.numel() + x.stride(0)
    return x / len(x)


def with_written_rows(net: Net, x: Tensor) -> Tensor:
    x = x * 1
    x[0] += 1
    x[:, 1] *= 2
    x[x > 1] = 0.5
    return x


def with_statistics(net: Net, x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std() + 1) + x.max()


def with_whole_noise(net: Net, x: Tensor) -> Tensor:
    return x + torch.linspace(0, 1, len(x), dtype=x.dtype)[:, None] * net.first.bias


def with_kept_rows(net: Net, x: Tensor) -> Tensor:
    net.kept = x.relu()
    return net.kept * 2


def with_a_detour_by_numpy(net: Net, x: Tensor) -> Tensor:
    return x * torch.from_numpy(x.detach().numpy()).sum()


def with_lists(net: Net, x: Tensor) -> Tensor:
    return torch.stack([row / (1 + position) for position, row in enumerate(x)])


def with_a_branch(net: Net, x: Tensor) -> Tensor:
    return x.relu() if x.sum() > 0 else x.sigmoid()


def with_dropout(net: Net, x: Tensor) -> Tensor:
    return F.dropout(F.dropout(x.t(), 0.4).t(), 0.3) * torch.rand_like(x)


def with_einsum_and_cat(net: Net, x: Tensor) -> Tensor:
    y = torch.einsum("bi,ij->bj", x, net.first.weight @ net.first.weight.t())
    return torch.cat([y[:, :3], x[:, 3:]], 1) + torch.cat([x, y])[: len(x)]


def with_gradient_of_its_input(net: Net, x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(y.pow(3).mean(), y)
    return x + slope


FORMS = {each.__name__: each for each in (
    with_own_function, with_vmap, with_vmap_over_weights, with_grad_of_func, with_checkpoint, with_hook, with_counts,
    with_written_rows,
    with_statistics, with_whole_noise, with_kept_rows, with_a_detour_by_numpy, with_lists, with_a_branch, with_dropout,
    with_einsum_and_cat, with_gradient_of_its_input,
)}  # fmt: skip


def trained(name: str, call: Callable[[Net, Tensor], Any], backward: Callable[[Net, Tensor], None]) -> dict[str, Any]:
    """Two steps, with what the model keeps in the loss, and a copy of the model afterwards."""
    torch.manual_seed(0)
    net = Net(FORMS[name]).double()
    value = torch.randn(ROWS, 4, dtype=torch.float64)
    outputs = []
    for _ in range(2):
        net.zero_grad()
        made = call(net, value)
        outputs.append(full(made.detach()).clone())
        loss = made.square().mean() + (0 if net.kept is None else net.kept.sum() + net.kept.std())
        backward(net, loss)
        with torch.no_grad():
            for each in net.parameters():
                each.sub_(0.1 * each.grad)  # type: ignore[operator]
    net.kept = net.what = None  # type: ignore[assignment]
    again = copy.deepcopy(net)
    return {"outputs": outputs, "seen": net.seen, **again.state_dict()}


def on_a_process(rank: int) -> Callable[[str], dict[str, Any]]:
    def work(name: str) -> dict[str, Any]:
        sums = GradientSums()
        with activate(RowsContext(rank=rank, size=3, twin=sums.twin)), replaced(*entries(sums)):
            return trained(
                name,
                lambda net, value: as_rows(net(as_own(split(value)))),
                lambda net, loss: sums.backward(list(net.parameters()), loss.backward),
            )

    return work


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(3, on_a_process)
    yield made
    made.close()


@pytest.mark.parametrize("name", FORMS)
def test_a_module_learns_what_it_does_on_one_process(name: str, world: World) -> None:
    alone = trained(name, lambda net, value: net(value), lambda net, loss: loss.backward())
    for process in world.run(name):
        torch.testing.assert_close(process, alone, rtol=1e-11, atol=1e-12)


# ---- Writes to what a module gets --------------------------------------------------------------------------


def test_a_write_to_the_input_is_seen_outside() -> None:
    with activate(RowsContext()):
        value = split(torch.randn(6, 3))
        plain, own = full(value).clone(), as_own(value)
        made = nn.ReLU(inplace=True)(own)
        own.view(2, 9)[0] = 7.0
        assert made is own
        want = plain.relu()
        want.view(2, 9)[0] = 7.0
        assert torch.equal(full(value), want)
        assert torch.equal(full(value + 0), want)
        assert torch.equal(full(as_rows(own)), want)


def test_what_a_module_keeps_follows_a_write_to_what_it_returned() -> None:
    weight = torch.randn(3, requires_grad=True)
    with activate(RowsContext()):
        kept = as_own(split(torch.ones(4, 3))) * weight
        returned = as_rows(kept)
        returned.mul_(3)
        (slope,) = torch.autograd.grad(as_rows(kept).sum(), weight)
    torch.testing.assert_close(full(slope), torch.full((3,), 12.0))


def test_a_view_that_a_write_goes_past_is_refused() -> None:
    with activate(RowsContext()):
        made = as_own(split(torch.ones(4, 3))) * 2
        turned = made.t()
        as_rows(made).mul_(3)
        with pytest.raises(GrappeError, match="clone"):
            turned + 1


def test_what_torch_does_not_announce_is_refused_before_a_gradient_is_lost() -> None:
    own_operator = torch.library.Library("grappe_own", "DEF")
    own_operator.define("double(Tensor x) -> Tensor")
    own_operator.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    with activate(RowsContext()):
        value = as_own(split(torch.randn(4, 3))) * torch.ones(3, requires_grad=True)
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(GrappeError, match="within a module"):
            torch.ops.grappe_own.double(value)


def test_hooks_of_a_module_on_what_autograd_saves_are_refused() -> None:
    with activate(RowsContext(within=1)), replaced(*entries(GradientSums())):
        with pytest.raises(GrappeError, match="around the module's call"):
            saved_tensors_hooks(lambda each: each, lambda each: each)
        save_on_cpu()
    saved_tensors_hooks(lambda each: each, lambda each: each)


def test_texts_and_copies() -> None:
    weight = torch.randn(3, requires_grad=True)
    with activate(RowsContext()):
        plain = torch.arange(6.0).view(2, 3)
        own = as_own(split(plain.repeat(2, 1)))
        assert repr(own * weight) == repr(plain.repeat(2, 1) * weight)
        assert f"{own.sum():.1f}" == "30.0"
        assert own.tolist() == plain.repeat(2, 1).tolist()
        file = io.BytesIO()
        torch.save(own, file)
        file.seek(0)
        assert torch.equal(torch.load(file), plain.repeat(2, 1))
        assert torch.equal(full(as_rows(copy.deepcopy(own))), plain.repeat(2, 1))
