"""Hand-written loops that the tests of grappe.Loop run in a pool's processes; each returns what it has learned."""

import contextlib
import io
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, TensorDataset

import grappe
from grappe.launch.rank import ProcessRank
from grappe.training import own_loop_world

ROWS = 22
DATA = TensorDataset(
    torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    torch.arange(ROWS) % 3,
)


def model(make: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))) -> Any:
    torch.manual_seed(3)
    return make().double()


def weights(trained: nn.Module) -> list[Tensor]:
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in trained.parameters()]
    return [each.detach().clone() for each in whole]


def in_process(place: ProcessRank, meet: Path, name: str, plan: str, *arguments: Any) -> Any:
    """Runs a loop of this module as one of a launch's processes."""
    own_loop_world.Joined.process, own_loop_world.Joined.folder = place, Path(meet)
    loop = grappe.Loop(f"{plan},device=cpu,threads=1".lstrip(","))
    try:
        return globals()[name](loop, *arguments)
    finally:
        loop._close_at_exit()
        own_loop_world.leave()
        own_loop_world.Joined.process = None


def printed(place: ProcessRank, meet: Path, text: str, plan: str) -> list[str]:
    """Runs a script as one of a launch's processes; returns what it prints."""
    own_loop_world.Joined.process, own_loop_world.Joined.folder = place, Path(meet)
    os.environ[own_loop_world.PLAN] = f"{plan},device=cpu,threads=1,workers=0"
    names: dict[str, Any] = {"__name__": "script"}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "script", "exec"), names)
        names["loop"]._close_at_exit()
    finally:
        own_loop_world.leave()
        own_loop_world.Joined.process = None
        del os.environ[own_loop_world.PLAN]
    return out.getvalue().splitlines()


# ---- Loop bodies: weights and numbers must be those of one process ----------------------------------------------


def branches(loop: grappe.Loop) -> list[Tensor]:
    """Two heads that take turns, one that is never used, and gradients that two backwards add up to."""
    heads = nn.ModuleDict({"one": model(), "other": model(), "unused": nn.Linear(2, 2)})
    heads, optimizer = loop.parallelize(heads, torch.optim.Adam(heads.parameters(), lr=0.05, weight_decay=0.1))
    for epoch in range(2):
        for inputs, targets in loop.batches(DATA, 5):
            head = heads["one" if loop.step % 2 else "other"]
            optimizer.zero_grad()
            F.cross_entropy(head(inputs), targets).backward()
            if epoch:
                head(inputs).square().mean().backward()
            clip_grad_norm_(heads.parameters(), 0.5)
            optimizer.step()
    return weights(heads)


def padded(loop: grappe.Loop) -> list[Any]:
    """Tokens padded to the longest of a batch by a collate that draws, attention, and a loss that ignores padding."""
    texts = [torch.arange(length) % 7 + 1 for length in range(2, 2 + ROWS)]

    def collate(samples: list[Tensor]) -> Any:
        tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        tokens = torch.where((torch.rand(tokens.shape) < 0.2) & (tokens > 0), 7, tokens)
        return tokens[:, :-1], tokens[:, 1:]

    net = model(
        lambda: nn.Sequential(
            nn.Embedding(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8)
        )
    )
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.05))
    read = []
    for tokens, following in loop.batches(texts, 8, epochs=2, collate=collate):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(tokens).flatten(0, 1), following.flatten(), ignore_index=0)
        loss.backward()
        optimizer.step()
        read.append([loss.item(), *tokens.shape, (following > 0).sum().item()])
    return [*weights(net), torch.tensor(read)]


def contrastive(loop: grappe.Loop) -> list[Any]:
    """A loss of every row with every other, noise of the body's own, dropout and batch normalisation."""
    net = model(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)))
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for inputs, _ in loop.batches(DATA, 8, epochs=2):
        optimizer.zero_grad()
        factor = torch.from_numpy(np.random.rand(len(inputs), 1)) + random.random()
        other = inputs + 0.1 * torch.randn(inputs.shape, dtype=inputs.dtype) * factor
        z = F.normalize(net(torch.cat([inputs, other])), dim=1)
        F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)).roll(len(inputs))).backward()
        optimizer.step()
    return [*weights(net), *net.buffers()]


def recurrent(loop: grappe.Loop) -> list[Any]:
    """An LSTM with a GradScaler, gradients accumulated over batches, clipped, and an average of the weights."""
    net = model(lambda: nn.LSTM(2, 5, 2, batch_first=True, dropout=0.2))
    head = model(lambda: nn.Linear(5, 3))
    both = nn.ModuleList([net, head])
    both, optimizer = loop.parallelize(both, torch.optim.SGD(both.parameters(), lr=0.5))
    scaler, read = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for inputs, targets in loop.batches(DATA, 5, epochs=2):
        output = head(net(inputs.unflatten(1, (3, 2)))[0][:, -1])
        loss = F.cross_entropy(output, targets) / 2
        scaler.scale(loss).backward()
        if loop.step % 2:
            scaler.unscale_(optimizer)
            read.append(float(clip_grad_norm_(both.parameters(), 0.5)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [*weights(both), torch.tensor(read)]


def closure(loop: grappe.Loop) -> list[Any]:
    """L-BFGS, of few steps, as it is chaotic, and a hook that clips a gradient."""
    net = model()
    next(net.parameters()).register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    net, optimizer = loop.parallelize(net, torch.optim.LBFGS(net.parameters(), max_iter=4))
    for inputs, targets in loop.batches(DATA, 8):

        def loss(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(net(inputs), targets)
            value.backward()
            return value

        optimizer.step(loss)
    return weights(net)


class Pictures(Dataset):
    """Samples that a module transforms, with their names."""

    def __init__(self, *, named: bool) -> None:
        self.named, self.transform = named, nn.Sequential(nn.Unflatten(0, (3, 2)), nn.LayerNorm(2, bias=False)).double()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        with torch.no_grad():
            image = self.transform(DATA[number][0]) + 0.1 * torch.rand(2)
        return {"image": image, "target": number % 3, **({"name": f"{number}"} if self.named else {})}


def loaded(loop: grappe.Loop) -> list[Any]:
    """Batches of dictionaries, with names and without, in an order with repeats; a loader of the script's own."""
    net = model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)))
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.5))
    drawn, read = grappe.Sampling(weights=torch.arange(1.0, ROWS + 1)), []
    for named in (False, True):
        for batch in loop.batches(Pictures(named=named), 8, sampling=drawn):
            optimizer.zero_grad()
            F.cross_entropy(net(batch["image"]), batch["target"]).backward()
            optimizer.step()
            read.append(sum(map(int, batch["name"])) if named else batch["target"].sum().item())
        with torch.no_grad():
            read += [net(batch["image"]).sum().item() for batch in DataLoader(Pictures(named=named), 6, shuffle=True)]
    return [*weights(net), torch.tensor(read)]


class Penalised(nn.Module):
    """A model that computes a loss of its own weights, one of which is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.factor = model(), nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.factor * self.net(inputs), self.factor.square()


def overflowing(loop: grappe.Loop) -> list[Tensor]:
    """A step whose gradient has an infinity under fp16, of a model with a schedule."""
    net, is_half = Penalised(), loop.plan.precision == "fp16"
    net, optimizer = loop.parallelize(net.float() if is_half else net, torch.optim.SGD(net.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loop.keep(schedule=schedule)
    before = []
    for inputs, targets in loop.batches(DATA, 8):
        optimizer.zero_grad()
        output, penalty = net(inputs.float() if is_half else inputs)
        loss = F.cross_entropy(output, targets) + 0.1 * penalty
        if loop.step == 1:
            before, loss = weights(net), loss * (3e38 if is_half else 1)
        loss.backward()
        optimizer.step()
        schedule.step()
        if loop.step == 1 and is_half:
            assert all(map(torch.equal, before, weights(net)))
            assert schedule.last_epoch == 1
    if is_half:
        assert loop._steps.keys.scale.value == 2.0**15
    return weights(net)


def blocks(loop: grappe.Loop) -> list[Tensor]:
    """A model of repeated blocks, which nobody names as units."""
    net = model(
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        )
    )
    net, optimizer = loop.parallelize(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    if loop.plan.uses_fsdp:
        from torch.distributed.fsdp import FSDPModule

        assert sum(isinstance(module, FSDPModule) for module in net.modules()) == 4, "three blocks and the root"
    for inputs, _ in loop.batches(DATA, 8, epochs=2):
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        net(torch.ones(1, 6, dtype=torch.float64)).mean().backward()  # which is not split
        clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return weights(net)


def thawed(loop: grappe.Loop) -> list[Tensor]:
    """A model of two optimizers whose first layer is frozen in the first and in the last of three epochs."""
    net = model()
    net[0].requires_grad_(False)
    first, then = (torch.optim.SGD(net[place].parameters(), lr=0.2) for place in (0, 2))
    for optimizer in (first, then):
        net, _ = loop.parallelize(net, optimizer)
    trained = []
    for epoch in range(3):
        net[0].requires_grad_(epoch == 1)
        for inputs, targets in loop.batches(DATA, 8):
            first.zero_grad()
            then.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            first.step()
            then.step()
        trained += weights(net)
    return trained


def second(loop: grappe.Loop) -> list[Tensor]:
    """Two loops that are open at once, and one after them; nothing that they replace is left."""
    other = grappe.Loop(loop.plan)
    loops = [(each, *each.parallelize(net := model(), torch.optim.SGD(net.parameters(), lr=0.1)))
             for each in (loop, other)]  # fmt: skip
    learned = [_trained(*each) for each in loops]
    loop._close_at_exit()
    other._close_at_exit()
    for owner, name in ((torch.autograd, "backward"), (nn.Module, "__call__"), (torch.optim.Optimizer, "__init__")):
        assert "grappe" not in getattr(owner, name).__module__
    with grappe.Loop(loop.plan) as last:
        learned.append(_trained(last, *last.parallelize(net := model(), torch.optim.SGD(net.parameters(), lr=0.1))))
    return [each for every in learned for each in every]


def _trained(loop: grappe.Loop, net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    loss = torch.zeros(())
    for inputs, _ in loop.batches(DATA, 8):
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        loss.backward()
        optimizer.step()
    return [*weights(net), torch.tensor(loss.item())]


def unloaded(loop: grappe.Loop) -> list[Tensor]:
    """Batches that the body draws, rates that it sets, a penalty of a gradient, three optimizers of two models."""
    both = nn.ModuleList([model(), model(lambda: nn.Linear(3, 6))])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (*both, both)]
    for optimizer in optimizers:
        loop.parallelize(both, optimizer)
    for step in range(6):
        inputs, optimizer = torch.randn(9, 6, dtype=torch.float64), optimizers[step % 3]
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.zero_grad()
        for part in inputs.requires_grad_().split(5):
            code = both[0](part)
            [slope] = torch.autograd.grad(code.square().sum(), part, create_graph=True)
            (F.mse_loss(both[1](code), part) + 0.1 * slope.square().mean()).backward()
        optimizer.step()
        for each in both.parameters():
            each.data.clamp_(-0.4, 0.4)
    return weights(both)


def evaluated(loop: grappe.Loop) -> dict[str, float]:
    """Scores of all samples, with fewer than a slice at the end, in the middle of a training."""
    net = model(lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None), nn.Dropout(0.5)))
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1))
    scores = {}
    for inputs, targets in loop.batches(DATA, 8):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()

        def score(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return {
                "first": inputs[:, 0],
                "small": targets.lt(2).float(),
                "loss": F.cross_entropy(net(inputs), targets, reduction="none"),
                "eval": torch.full((len(inputs),), 1.0 * net.training),
            }

        scores = loop.evaluate(DATA, score, batch_size=7)
        assert net.training
    return scores


def refused(loop: grappe.Loop, case: str) -> str:
    """Returns the message with which a body is refused."""
    net = model()
    try:
        if case == "hook":
            next(net.parameters()).register_hook(torch.triu)
        if case == "closure":
            loop.parallelize(net, torch.optim.LBFGS(net.parameters()))
        net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1))
        data: Any = [(DATA[row][0], torch.zeros(1 + row // 2)) for row in range(ROWS)] if case == "shapes" else DATA
        for inputs, _ in loop.batches(data, 4, sampling=grappe.Sampling(shuffle=False)):
            if case == "zip":
                next(loop.batches(DATA, 8))
            loss = net(inputs).square().mean()
            loss.backward()
            optimizer.step()
            if case == "alone" and not loop.world.rank:
                loss.item()
            if case == "score":
                loop.evaluate(DATA, lambda inputs, _: inputs.mean())
    except grappe.GrappeError as error:
        return str(error)
    return ""
