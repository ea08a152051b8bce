"""Hand-written loops that the tests of grappe.Loop run in a pool's processes; each returns what it has learned."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import grappe
from grappe.launch.rank import ProcessRank
from grappe.training import own_loop_world

ROWS = 22
DATA = TensorDataset(
    torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1)),
    torch.arange(ROWS) % 3,
)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def weights(trained: nn.Module) -> list[Tensor]:
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in trained.parameters()]
    return [each.detach().clone() for each in whole]


def in_process(place: ProcessRank, meet: Path, name: str, plan: str, *arguments: Any) -> Any:
    """Runs a loop of this module as one of a launch's processes."""
    own_loop_world.become(place, Path(meet))
    loop = grappe.Loop(f"{plan},device=cpu,threads=1".lstrip(","))
    try:
        return globals()[name](loop, *arguments)
    finally:
        loop._close_at_exit()
        own_loop_world.leave()
        own_loop_world.Joined.process = None


# ---- What a body may do ------------------------------------------------------------------------------------


def branches(loop: grappe.Loop) -> list[Tensor]:
    """Two heads that take turns, one that is never used, and gradients that two backwards add up to."""
    heads = nn.ModuleDict({"one": model(), "other": model(), "unused": nn.Linear(2, 2)})
    heads, optimizer = loop.parallelize(heads, torch.optim.Adam(heads.parameters(), lr=0.05, weight_decay=0.1))
    for epoch in range(2):
        for inputs, targets in loop.batches(DATA, 5):
            head = heads["one" if loop.step % 2 else "other"]
            optimizer.zero_grad()
            loop.mean(F.cross_entropy(head(inputs), targets, reduction="none")).backward()
            if epoch:
                loop.mean(head(inputs).square()).backward()
            nn.utils.clip_grad_norm_(heads.parameters(), 0.5)
            optimizer.step()
    return weights(heads)


def padded(loop: grappe.Loop) -> list[Tensor]:
    """A mean over tokens, of which samples have different numbers; and a sum."""
    net = model()
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for inputs, targets in loop.batches(DATA, 5, epochs=2):
        optimizer.zero_grad()
        losses = net(inputs).square()
        counts = (torch.arange(3) <= targets[:, None]).float()
        loop.mean(losses, counts).backward(retain_graph=True)
        loop.sum(0.01 * losses.sum(1)).backward()
        optimizer.step()
    return weights(net)


def noisy(loop: grappe.Loop) -> list[Tensor]:
    """Dropout, noise of the body's own, and batch normalisation."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for inputs, targets in loop.batches(DATA, 8, epochs=2):
        optimizer.zero_grad()
        noise = 0.1 * torch.randn_like(inputs)
        loop.mean(F.cross_entropy(net(inputs + noise), targets, reduction="none")).backward()
        optimizer.step()
    return weights(net)


class Branches(nn.Module):
    """A model with dropout and two heads, which are called in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3))
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, inputs: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(inputs))


def accumulated(loop: grappe.Loop) -> list[Tensor]:
    """Microbatches: two losses of a model, dropout, noise, token counts, clipping; an uneven last batch."""
    net = Branches()
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5))
    for batch in loop.batches(DATA, 5, epochs=2):
        optimizer.zero_grad()
        scale = torch.rand(())
        for inputs, targets in loop.microbatches(batch, counts=lambda part: _counts(part[1])):
            output = net(inputs + 0.1 * torch.randn_like(inputs), loop.step % 2)
            loop.backward(loop.mean(F.cross_entropy(output, targets, reduction="none")) * scale)
            loop.backward(loop.mean(net(inputs, 0).square(), _counts(targets)))
        loop.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return weights(net)


def _counts(targets: Tensor) -> Tensor:
    return (torch.arange(3) <= targets[:, None]).float()


def overflowing(loop: grappe.Loop) -> list[Tensor]:
    """A step whose gradient has an infinity, of a model with a schedule; an auxiliary loss that is no mean of rows."""
    net = Penalised()
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loop.keep(schedule=schedule)
    before = []
    for inputs, targets in loop.batches(DATA, 8):
        optimizer.zero_grad()
        output, penalty = net(inputs)
        losses = F.cross_entropy(output, targets, reduction="none")
        if loop.step == 1:
            before, losses = weights(net), losses * (3e38 if loop.plan.precision == "fp16" else 1)
        loop.backward(loop.mean(losses) + 0.1 * penalty)
        optimizer.step()
        schedule.step()
        if loop.step == 1 and loop.plan.precision == "fp16":
            assert all(map(torch.equal, before, weights(net)))
            assert schedule.last_epoch == 1
    if loop.plan.precision == "fp16":
        assert loop._running.scale.value == 2.0**15
    return weights(net)


class Penalised(nn.Module):
    """A model that computes a loss of its own weights, one of which is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.factor = model(), nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.factor * self.net(inputs), self.factor.square()


def blocks(loop: grappe.Loop) -> list[Tensor]:
    """A model of repeated blocks, which nobody names as units."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))))
    net, optimizer = loop.parallelize(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    if loop.plan.uses_fsdp:
        from torch.distributed.fsdp import FSDPModule

        assert sum(isinstance(module, FSDPModule) for module in net.modules()) == 4, "three blocks and the root"
    for inputs, _ in loop.batches(DATA, 8, epochs=2):
        optimizer.zero_grad()
        loop.mean(net(inputs).square()).backward()
        optimizer.step()
    return weights(net)


def evaluated(loop: grappe.Loop) -> dict[str, float]:
    """Scores of all samples, with fewer than a slice at the end, in the middle of a training."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None), nn.Dropout(0.5))
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1))
    scores = {}
    for inputs, targets in loop.batches(DATA, 8):
        optimizer.zero_grad()
        loop.mean(F.cross_entropy(net(inputs), targets, reduction="none")).backward()
        optimizer.step()

        def score(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return {
                "first": inputs[:, 0],
                "small": targets.lt(2).float(),
                "eval": torch.full((len(inputs),), 1.0 * net.training),
            }

        scores = loop.evaluate(DATA, score, batch_size=7)
        assert net.training
    return scores


def second(loop: grappe.Loop) -> list[Tensor]:
    """Two loops of a script, which take turns."""
    other = grappe.Loop(loop.plan)
    first, then = (
        each.parallelize(net := model(), torch.optim.SGD(net.parameters(), lr=0.1)) for each in (loop, other)
    )
    for each, (net, optimizer) in ((loop, first), (other, then)):
        for inputs, _ in each.batches(DATA, 8):
            optimizer.zero_grad()
            each.mean(net(inputs).square()).backward()
            optimizer.step()
    return [*weights(first[0]), *weights(then[0])]


def closure(loop: grappe.Loop) -> str:
    net = model()
    try:
        loop.parallelize(net, torch.optim.LBFGS(net.parameters()))
    except grappe.GrappeError as error:
        return str(error)
    return ""


def thawed(loop: grappe.Loop) -> list[Tensor]:
    """A model of two optimizers whose first layer is frozen in the first and in the last of three epochs."""
    net = model()
    net[0].requires_grad_(False)
    first, then = (torch.optim.SGD(net[place].parameters(), lr=0.2) for place in (0, 2))
    net, first = loop.parallelize(net, first)
    net, then = loop.parallelize(net, then)
    trained = []
    for epoch in range(3):
        net[0].requires_grad_(epoch == 1)
        for batch in loop.batches(DATA, 8):
            first.zero_grad()
            then.zero_grad()
            for inputs, targets in loop.microbatches(batch):
                loop.backward(loop.mean(F.cross_entropy(net(inputs), targets, reduction="none")))
            first.step()
            then.step()
        trained += weights(net)
    return trained


def refused(loop: grappe.Loop, case: str) -> str:
    """Returns the message with which a body is refused that would not learn what it learns on one process."""
    net = model()
    first, hooks = next(net.parameters()), {"clamp": lambda gradient: gradient.clamp(-0.1, 0.1), "mask": torch.triu}
    try:
        if case in hooks:
            first.register_hook(hooks[case])
        if case == "after":
            first.register_post_accumulate_grad_hook(lambda each: each.grad.clamp_(-0.1, 0.1))
        net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1))
        if case == "late":
            next(net.parameters()).register_hook(hooks["clamp"])
        for batch in loop.batches(DATA, 8):
            if case == "zip":
                next(loop.batches(DATA, 8))
            if case == "whole":
                inputs, _ = batch
            for inputs, _ in loop.microbatches(batch):
                losses = net(inputs).square()
                if case == "widths":  # as a collate pads each slice to its own longest sample
                    losses = losses[:, : 1 + loop.world.rank]
                loss = losses.mean() if case == "its own mean" else loop.mean(losses)
                if case == "plain backward":
                    loss.backward()
                loop.backward(loss)
                if case in ("early step", "its own mean"):
                    optimizer.step()
                if case == "left":
                    break
            if case in (*hooks, "after", "late"):
                optimizer.step()
    except grappe.GrappeError as error:
        return str(error)
    return ""


def drawn_otherwise(loop: grappe.Loop) -> tuple[list[list[float]], str]:
    """Returns NumPy's and Python's draws of each step, and what is said of them and of a generator of the body's."""
    own, drawn = torch.Generator(), []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for inputs, _ in loop.batches(DATA, 8):
            drawn.append([np.random.rand(), random.random()])
            torch.rand(len(inputs), generator=own)
        for _ in loop.batches(DATA, 8):
            torch.empty(5).cauchy_()
            break
    return drawn, said.getvalue()


def gathered(loop: grappe.Loop) -> list[Any]:
    """Batches of dictionaries and of a collate of one's own, in an order with repeats."""
    samples = [{"x": DATA[row][0], "y": row} for row in range(ROWS)]
    drawn = grappe.Sampling(weights=torch.arange(1.0, ROWS + 1))
    seen = [loop.world.gather_data(part["y"].tolist()) for part in loop.batches(samples, 8, sampling=drawn)]
    joined = [len(loop.world.gather_data(part)[0]) for part in loop.batches(samples, 8, collate=len_of)]
    mean = loop.evaluate(samples, lambda part: {"x": part["x"][:, 0]}, batch_size=7)
    return [[[*itertools.chain(*rows)] for rows in seen], joined, mean["x"]]


def len_of(samples: list[Any]) -> str:
    return "x" * len(samples)


def printed(place: ProcessRank, meet: Path, text: str, plan: str) -> tuple[list[str], Any]:
    """Runs a script as one of a launch's processes; returns what it prints, on process 0 of several."""
    own_loop_world.become(place, Path(meet))
    os.environ[own_loop_world.PLAN] = f"{plan},device=cpu,threads=1,workers=0".lstrip(",")
    names: dict[str, Any] = {"__name__": "script"}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "script", "exec"), names)
        names["loop"]._close_at_exit()
    finally:
        own_loop_world.leave()
        own_loop_world.Joined.process = None
        del os.environ[own_loop_world.PLAN]
    return out.getvalue().splitlines(), names["loop"].world.size
