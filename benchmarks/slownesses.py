"""Eight injected bottlenecks, each a task or a plan, with the same training without it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from grappe import Arrays, Task
from grappe.contrib.lab.breakdown import SMALL_BATCH

ROWS, CLASSES = 4096, 4


class Slow(Dataset):
    """Random rows, each of which takes `nap` seconds to load."""

    def __init__(self, width: int, nap: float) -> None:
        self._row, self._nap = torch.randn(width), nap

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._nap)
        return self._row, index % CLASSES


class Many(nn.Module):
    """Multiplies by one number, many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x * 0.999
        return x


class Reading(nn.Module):
    """Divides by the largest number, which Python looks for row by row, or torch."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        if not self.reads:
            return x / x.detach().abs().max()
        return x / max(row.abs().max().item() for row in x.detach())


class Table(nn.Module):
    """Adds a row of a table that is laid out in the other order, or not."""

    def __init__(self, width: int, copies: bool) -> None:
        super().__init__()
        self.copies = copies
        self.register_buffer("table", torch.randn(width, 16384))

    def forward(self, x: Tensor) -> Tensor:
        table = self.table.t().contiguous() if self.copies else self.table.t()
        return x + table[0]


class _Nap(torch.autograd.Function):
    """Sleeps for each row, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nap: float) -> Tensor:
        ctx.nap = nap
        time.sleep(nap * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.nap * len(gradients[0]))
        return gradients[0], None


class Sleeps(nn.Module):
    """Sleeps for each row, longer on process 1: work that no other process's work makes slower."""

    def __init__(self, nap: float, late: float = 0.0) -> None:
        super().__init__()
        is_slow = multiprocessing.current_process().name == "grappe-rank-1"
        self.nap = nap + (late if is_slow else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_meta else _Nap.apply(x, self.nap)


class Planted(Task):
    """A perceptron with a slowness."""

    epochs: int = 1
    batch_size: int = 64
    width: int = 256
    layers: int = 2
    nap: float = 0.0
    """Seconds to load a sample."""
    computing: float = 0.0
    """Seconds that a row sleeps in forward."""
    operators: int = 0
    reads: str = "no"
    copies: str = "no"
    late: float = 0.0
    """Seconds for each row, of process 1 alone."""
    wide: int = 0
    """Outputs of the first of two layers."""
    alone: bool = False
    """Whether processes keep their own gradients."""

    def model(self) -> nn.Module:
        if self.alone:
            _alone()
        width = self.width
        blocks: list[nn.Module] = [nn.Linear(width, width) for _ in range(self.layers)]
        extra: list[nn.Module] = []
        if self.wide:
            blocks = [nn.Linear(width, self.wide), nn.Linear(self.wide, CLASSES)]
        if self.operators:
            extra.append(Many(self.operators))
        if self.reads != "no":
            extra.append(Reading(self.reads == "item"))
        if self.copies != "no":
            extra.append(Table(width, self.copies == "each"))
        if self.computing:
            extra.append(Sleeps(self.computing, self.late))
        return nn.Sequential(*blocks[:-1], *extra, blocks[-1])

    def data(self, split: str, folder: Path) -> Any:
        if self.nap and split == "train":
            return Slow(self.width, self.nap)
        rows = ROWS if split == "train" else 64
        draw = torch.Generator().manual_seed(0)
        return Arrays(torch.randn(rows, self.width, generator=draw), torch.arange(rows) % CLASSES)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named_parameters, lr=1e-4)

    def units(self, model: Any) -> list[nn.Module]:
        return list(model)


def _alone() -> None:
    """Makes DistributedDataParallel keep each process's own gradients, in its buckets, from now on in this process."""
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

    made = DistributedDataParallel.__init__

    def own(state, bucket):
        done: Any = Future()
        done.set_result(bucket.buffer())
        return done

    def without(self: Any, *arguments: Any, **keywords: Any) -> None:
        made(self, *arguments, **keywords)
        self.register_comm_hook(None, own)

    DistributedDataParallel.__init__ = without  # type: ignore[method-assign]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A planted slowness."""

    name: str
    part: str
    """The part that it must be named as."""
    task: Task
    without: Task
    """The same without the slowness."""
    plan: str = ""
    plan_without: str | None = None
    """None: the same."""


def cases() -> Sequence[Case]:
    """Makes the eight."""
    return [make() for make in MAKERS]


def _two(part: str, name: str, slow: dict[str, Any], quick: dict[str, Any], **keywords: Any) -> Case:
    return Case(name=name, part=part, task=Planted(**slow), without=Planted(**quick), **keywords)


def _tiny_batch() -> Case:
    base = {"width": 1024, "layers": 6}
    return _two(SMALL_BATCH, "tiny batch", {**base, "batch_size": 2}, {**base, "batch_size": 8})


def _reading() -> Case:
    base = {"batch_size": 1024, "width": 64}
    return _two("values read by the host", ".item() of each row", {**base, "reads": "item"}, {**base, "reads": "none"})


def _all_reduce() -> Case:
    base = {"width": 2048, "wide": 4096, "batch_size": 32}
    return _two("waiting for other processes", "one long all-reduce", base, {**base, "alone": True}, plan="replicate=2")


SLEEPS = {"computing": 0.0002}
MAKERS: tuple[Callable[[], Case], ...] = (
    lambda: _two("waiting for data", "slow loader", {"nap": 0.0005, **SLEEPS}, SLEEPS, plan="workers=0"),
    lambda: _two("host between kernels", "tiny operators", {"operators": 2000, "width": 32}, {"width": 32}),
    _reading,
    lambda: _two("waiting for other processes", "slow process", {"late": 0.001, **SLEEPS}, SLEEPS, plan="replicate=2"),
    _tiny_batch,
    lambda: _two(
        "precision not used", "fp32 where bf16 is meant", {"width": 1024, "layers": 4, "batch_size": 512},
        {"width": 1024, "layers": 4, "batch_size": 512}, plan_without="precision=bf16",
    ),
    lambda: _two("copies of layouts", "layout copied each step", {"copies": "each"}, {"copies": "once"}),
    _all_reduce,
)  # fmt: skip
