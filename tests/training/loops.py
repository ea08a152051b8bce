"""Hand-written loops that the tests of grappe.Loop run in a pool's processes; each returns what it has learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import grappe
from grappe.launch.rank import ProcessRank
from grappe.training import own_loop

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
    own_loop.become(place, Path(meet))
    loop = grappe.Loop(f"{plan},device=cpu,threads=1".lstrip(","))
    try:
        return globals()[name](loop, *arguments)
    finally:
        loop._close_at_exit()
        own_loop.leave()
        own_loop._Joined.process = None


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
