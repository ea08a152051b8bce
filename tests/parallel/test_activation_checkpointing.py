"""Activation checkpointing of units that write buffers or attributes in forward: the second forward writes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grappe.data.datasets import dataset_of
from grappe.data.loader import training_loader
from grappe.errors import PlanError, TaskError
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.trace import CPU, Ledger, traced
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.parallel.activation_checkpointing import Host, checkpoint_activations
from grappe.parallel.attributes import copied
from grappe.plan import Plan
from grappe.private_api.torch import TorchDispatchMode, fake_tensors
from grappe.tasks.pysource import PySource


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


def _trained(*, recompute: bool | str, late: int = 0) -> tuple[Remembers, list[Tensor | None]]:
    torch.manual_seed(0)
    block = Remembers(late)
    if recompute:
        checkpoint_activations([block], Plan(recompute=recompute))
    for _ in range(3):
        block(torch.randn(6, 3)).square().sum().backward()
    return block, [parameter.grad for parameter in block.parameters()]


@pytest.mark.parametrize("recompute", [True, "selective", "host"])
def test_a_second_forward_sees_the_state_that_the_first_saw_and_leaves_what_that_left(recompute: bool | str):
    plain, gradients = _trained(recompute=False)
    recomputed, others = _trained(recompute=recompute)
    torch.testing.assert_close(others, gradients, rtol=0, atol=0)
    torch.testing.assert_close(dict(recomputed.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)
    assert recomputed.seen == plain.seen == 18
    assert torch.equal(recomputed.cache["held"], plain.cache["held"])
    assert torch.equal(recomputed.generator.get_state(), plain.generator.get_state())


def test_what_a_forward_begins_to_change_later_is_refused():
    with pytest.raises(TaskError, match=r"changes 'mask' now, and .* without recompute"):
        _trained(recompute=True, late=6)


class Attends(nn.Module):
    """Attention with dropout of its own, and dropout after it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.into, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        return nn.functional.dropout(mixed, 0.5).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_selective_unit_draws_what_it_drew_and_multiplies_no_matrix_twice(dropout: float):
    results = {}
    for recompute in (False, "host", "selective", True):
        torch.manual_seed(0)
        unit = Attends(dropout)
        checkpoint_activations([unit], Plan(recompute=recompute))
        calls = Counted()
        with calls:
            unit(torch.randn(3, 5, 8)).square().sum().backward()
        results[recompute] = ([parameter.grad for parameter in unit.parameters()], calls.products)
    for recompute in ("host", "selective", True):
        torch.testing.assert_close(results[recompute][0], results[False][0], rtol=0, atol=0)
    assert results["selective"][1] == results[False][1] < results[True][1]


class Counted(TorchDispatchMode):
    """Counts products with a bias: of a linear layer's forward."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_a_unit_that_is_not_there_is_named():
    with pytest.raises(PlanError, match="full:1-2 names no units of this model, which has 2"):
        checkpoint_activations([nn.Linear(2, 2), nn.Linear(2, 2)], Plan(recompute="selective:0+full:1-2"))


@pytest.mark.parametrize("recompute", ["host", "selective", True])
def test_what_a_unit_changes_in_place_is_computed_again(recompute: bool | str):
    gradients = []
    for level in (False, recompute):
        torch.manual_seed(0)
        unit = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3), nn.Hardtanh(inplace=True))
        checkpoint_activations([unit], Plan(recompute=level))
        unit(torch.randn(2, 2, 8, 8)).square().sum().backward()
        gradients.append([parameter.grad for parameter in unit.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


class Measured(nn.Module):
    """Keeps a measure of its hidden values, which no loss uses, and goes on with these values, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.scale, self.measure = nn.Linear(3, 4), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.into(x)
        return hidden * self.measure, hidden.mul_(2) * self.scale


@pytest.mark.parametrize("recompute", ["host", "selective", True])
def test_backward_reads_what_a_change_in_place_left(recompute: bool | str):
    gradients = []
    for level in (False, recompute):
        torch.manual_seed(0)
        unit = Measured()
        checkpoint_activations([unit], Plan(recompute=level))
        _, output = measured = unit(torch.randn(5, 3))
        output.square().sum().backward()
        assert len(measured) == 2  # the measure lives as long as the output
        gradients.append([parameter.grad for parameter in unit.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.mark.parametrize("offset", [0, 3])
def test_a_traced_tensor_is_copied_without_its_memory(offset: int):
    with fake_tensors():
        table = torch.zeros(20_000_000)[offset:]
        twin = copied({("", "table"): table})["", "table"]
    assert twin is not table and twin.shape == table.shape


class OtherMemory(Host):
    """Memory that torch does not allocate: to its allocator, what a host's is to a GPU's."""

    def to_host(self, flat: Tensor) -> Any:
        return flat.numpy().copy()

    def to_device(self, copy: Any, device: torch.device) -> Tensor:
        return torch.empty_like(torch.from_numpy(copy)).copy_(torch.from_numpy(copy))


def test_views_share_a_copy_that_goes_to_the_host_and_comes_back_once():
    moved, kept = {}, {}
    for recompute in (False, "host"):
        torch.manual_seed(0)
        unit, x = Attends(0.0), torch.randn(3, 5, 8)
        [host] = checkpoint_activations([unit], Plan(recompute=recompute), OtherMemory)
        ledger = Ledger([*unit.parameters(), x])
        with ledger:
            loss = unit(x).square().sum()
            kept[recompute] = ledger.now
            loss.backward()
        moved[recompute] = host.moved
    packed = 4 * 3 * 5 * (8 + 24)  # the input; and queries, keys and values, which are views of one tensor
    assert moved[False] == 0 and moved["host"] >= 2 * packed
    assert moved["host"] == 2 * (kept[False] - kept["host"] + x.nbytes)


def test_a_step_with_activations_on_the_host_has_the_peak_that_is_traced():
    """Compares what is traced for a GPU with what torch's allocator is asked for, the host's memory apart."""
    task = PySource(width=64, depth=2, heads=2, batch_size=8, megabytes=0.3)
    foreseen = FakeModel(task, Path("data"), foreach=True).trace(8, recompute="host")
    fake = FakeModel(task, Path("data"))
    torch.manual_seed(0)
    model = task.model().train()
    units = fake.units(model)
    hosts = checkpoint_activations(units, Plan(recompute="host"), OtherMemory)
    world = World(process=ProcessRank(), device=CPU)
    batch = next(training_loader(task, dataset_of(task, "train", Path("data")), Plan(), world).rehearsed())
    measured = traced(task, model, units, batch, "fp32", Plan(), world, describes=False)
    assert tuple(host.moved for host in hosts) == foreseen.moved
    assert max(mark.peak for mark in measured.marks) == max(mark.peak for mark in foreseen.marks)
