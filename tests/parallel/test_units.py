"""Blocks that are found where a task gives no units: which they are, what cannot be one, and that no number changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grappe import Arrays, Task
from grappe.parallel.materialise import on_meta
from grappe.parallel.units import blocks_for, blocks_of, units_of
from grappe.plan import Plan
from grappe.tasks.images.resnet import resnet
from grappe.training.reporting import lines
from grappe.training.run import Run
from tests.processes import Pool
from tests.training.test_training import train

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner[1](torch.relu(self.inner[0](x)))


class Net(nn.Module):
    """Three blocks in a list; subclasses use them in ways that a unit does not bear."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class WithoutACall(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.blocks[1].inner[0].weight.sum())  # type: ignore[union-attr,index]


class CalledTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[1](x))


class NeverCalled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))


class ChangesItsInput(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3))


class LooksAtValues(Net):
    """A mixture of experts: each process calls those that its samples need."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            rows = (x.argmax(1) == number).nonzero().flatten()
            if len(rows):
                x = x.index_copy(0, rows, block(x[rows]))
        return self.leave(x)


class Drawn(Net):
    """Layer drop: each process draws which layers it calls."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand([]) > 0.5:
                x = block(x)
        return self.leave(x)


class Record:
    """An output that is no tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Opaque(Block):
    def forward(self, x: Any) -> Any:
        return Record(super().forward(x.value if isinstance(x, Record) else x))


class HandsOnRecords(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Opaque() for _ in range(3))

    def forward(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x.value)


class Points(Task):
    """Points whose class is to be found, without units."""

    epochs: int = 1
    batch_size: int = 8
    net: type[nn.Module] = Net

    def model(self) -> nn.Module:
        return self.net()

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(3)
        return Arrays(torch.randn(32, WIDTH, generator=generator), torch.arange(32) % 3)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named_parameters, lr=0.01)


class InOne(Points):
    """The same, sharded in one piece."""

    def units(self, model: nn.Module) -> list[nn.Module]:
        return []


EXAMPLE = torch.ones(2, WIDTH)


def names(net: Any, example: Any = EXAMPLE) -> tuple[str, ...]:
    return blocks_of(Points(net=net), example).names


def test_blocks_of_a_list_in_a_sequence_and_nested_are_found() -> None:
    assert names(Net) == ("blocks.0", "blocks.1", "blocks.2")
    assert names(lambda: nn.Sequential(*(Block() for _ in range(2)))) == ("0", "1")
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert names(lambda: nn.TransformerEncoder(layer, 2), torch.ones(2, 4, 8)) == ("layers.0", "layers.1")
    assert names(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))) == ()
    residual = names(lambda: resnet(18, 10, nn.Conv2d(3, 64, 3)), torch.ones(2, 3, 32, 32))
    assert len(residual) == 8
    stages = [nn.Sequential(*(Block() for _ in range(2))) for _ in range(2)]
    assert names(lambda: nn.Sequential(*stages)) == ("0.0", "0.1", "1.0", "1.1")


@pytest.mark.parametrize(
    ("net", "usable"),
    [
        (WithoutACall, ("blocks.0", "blocks.2")),
        (CalledTwice, ("blocks.0", "blocks.2")),
        (NeverCalled, ("blocks.0", "blocks.1", "blocks.2")),
        (ChangesItsInput, ()),
        (LooksAtValues, ()),
        (Drawn, ()),
        (HandsOnRecords, ()),
    ],
)
def test_what_a_unit_does_not_bear_is_no_unit(net: type[nn.Module], usable: tuple[str, ...]) -> None:
    assert names(net) == usable


def test_units_are_looked_for_only_where_they_are_needed_and_not_given() -> None:
    task = Points()
    assert blocks_for(task, Plan.parse("replicate=2"), EXAMPLE).names == ()
    assert blocks_for(task, Plan.parse("shard=2,pipeline=2"), EXAMPLE).names == ()
    assert len(blocks_for(task, Plan.parse("shard=2"), EXAMPLE).names) == 3
    assert len(blocks_for(task, Plan.parse("recompute"), EXAMPLE).names) == 3
    assert blocks_for(InOne(), Plan.parse("shard=2"), EXAMPLE).names == ()
    assert blocks_for(InOne(), Plan.parse("shard=2"), EXAMPLE).ungrouped == 0
    alone = blocks_for(Points(net=LooksAtValues), Plan.parse("shard=2"), EXAMPLE)
    assert alone.ungrouped == sum(parameter.nbytes for parameter in Net().parameters())
    kept = blocks_for(task, Plan.parse("shard=2"), EXAMPLE, kept=["blocks.1"]).names
    assert kept == ("blocks.1",)
    assert len(blocks_for(task, Plan.parse("shard=2"), EXAMPLE, kept=["of another model"]).names) == 3
    model = on_meta(task)
    assert units_of(task, model, kept) == [model.blocks[1]]  # type: ignore[index]


@pytest.mark.parametrize("plan", ["shard=2", "shard=2,zero=2,microbatches=2,recompute"])
def test_no_bit_changes(pool: Pool, plan: str) -> None:
    tasks, size = (Points(), InOne()), Plan.parse(plan).processes
    pieces, whole = (pool.run("tests.parity.cell:train", size, task, plan, 4)[0]["weights"] for task in tasks)
    assert all(torch.equal(pieces[name], whole[name]) for name in whole)


def test_they_are_shown_and_a_resumed_run_keeps_them(tmp_path: Path) -> None:
    task = Points(epochs=2)
    train(tmp_path / "run", task, "recompute,threads=1", steps=2)  # type: ignore[arg-type]
    run = Run(tmp_path / "run")
    start = run.read_description()["start"]
    assert start["units"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert "units: 3 of blocks, found" in "\n".join(lines(start))
    run.describe(start={**start, "units": ["blocks.2"]})
    train(tmp_path / "run", task, "recompute,threads=1", steps=4)  # type: ignore[arg-type]
    assert run.read_description()["start"]["units"] == ["blocks.2"]


def test_what_it_costs_to_have_none_is_said() -> None:
    start = {"nodes": {"a": {"cpu": 2}}, "processes": 2, "threads": 1, "workers": 0, "inputs": [], "parameters": 1}
    start |= {"steps_per_epoch": 1, "units": [], "gathered": 1_200_000_000}
    assert list(lines(start))[-1].startswith("no units: all parameters are gathered at once, 1.2 GB at the peak: give")
    start |= {"gathered": 0, "recomputed_at_once": True}
    assert list(lines(start))[-1].startswith("no units: recompute runs the model again as a whole, which saves no")
