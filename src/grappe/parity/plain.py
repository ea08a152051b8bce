"""Plain: the reference. One process and a loop written by hand, that shares no code with any engine or feed.

What it has in common with a training is the initial weights, the order of the samples and the keys of their
randomness. Beside it run the same steps with each batch's rows in another order: how far these drift is what
rounding explains.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from grappe import world
from grappe.checkpoint.initial import built
from grappe.data.arrays import in_memory
from grappe.data.draw import mix, sample_keys
from grappe.data.keyed import Keyed
from grappe.data.ledger import cut, permute
from grappe.parity.changes import NO_CLIP, NOTHING, Changes, Seen, watched
from grappe.parity.draws import Draws
from grappe.parity.mixing import mixing_modules
from grappe.place import Place
from grappe.plan import Plan
from grappe.prepare.precision import autocast
from grappe.task import Task, overrides
from grappe.weights import Weights, named_tensors

ONE_PROCESS = Plan()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """A step's samples, where they are not those of the order: what a plan has really seen."""

    epoch: int
    ids: tuple[int, ...]
    count: float
    total: int
    """Steps that its schedule is made for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What the plain process is to do."""

    task: Any
    """A TaskReference."""
    data: Path
    steps: int
    folder: Path
    """Where the weights behind each step are written."""
    changes: Changes = NOTHING
    plan: Plan = ONE_PROCESS
    """Where it runs, and in what precision."""
    ways: int = 1
    """Slices that each batch is cut into, with buffers and random streams of their own, one after the other."""
    pieces: int = 1
    """Microbatches that each slice is cut into."""
    given: tuple[Given, ...] = ()
    run: None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the plain process, and how far the same sums in another order are away from it."""

    ids: tuple[int, ...]
    loss: float
    norm: float
    loss_noise: float
    norm_noise: float
    noise: dict[str, float]
    """By tensor, |a - b| / |a| in norms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """What the plain process did."""

    folder: Path
    steps: tuple[Step, ...]
    per_epoch: int
    length: int
    draws: tuple[str, ...]
    """Operators of the model that draw random numbers."""
    mixing: dict[str, str]
    """Modules that mix a batch's samples, by name: their classes."""
    always: tuple[str, ...]
    """Those that mix them in evaluation too."""
    buffers: tuple[str, ...]
    augments: bool
    clips: bool


def worker(asked: Asked, place: Place, meet: Path) -> Reference:
    """The plain process."""
    here = world.join(Plan(device=asked.plan.device, threads=asked.plan.threads), place, meet)
    task = watched(asked.task.resolve(), asked.changes, Seen())
    order = _Order(task, asked, here.device)
    weights = built(task)
    mixing, always, drawing = _probe(task, order, here.device, asked.changes.draws)

    def another() -> _Model:
        return _Model(task, asked, weights, here.device, order.total)

    first = another()
    twins = _Twins(another, bool(drawing)) if not asked.given and asked.ways == asked.pieces == 1 else None
    steps = []
    for number in range(asked.steps):
        batch = order.batch(number)
        with Draws(off=True) if asked.changes.draws else contextlib.nullcontext():
            loss, norm = first.step(number, batch)
        save_file(first.weights(), asked.folder / f"step-{number:03d}.safetensors")
        noise = twins.step(number, batch, first, (loss, norm)) if twins else (0.0, 0.0, {})
        steps.append(
            Step(
                ids=tuple(int(i) for way in batch.ways for piece in way for i in piece.ids),
                loss=loss, norm=norm, loss_noise=noise[0], norm_noise=noise[1], noise=noise[2],
            )
        )  # fmt: skip
    return Reference(
        folder=asked.folder,
        steps=tuple(steps),
        per_epoch=order.per_epoch,
        length=order.length,
        draws=drawing,
        mixing=mixing,
        always=always,
        buffers=tuple(name for name, _ in first.model.named_buffers()),
        augments=overrides(task, "augment"),
        clips=task.clip != NO_CLIP,
    )


def load(asked: Asked, place: Place, meet: Path) -> tuple[Any, ...]:
    """A trial's samples, each drawn once: (input, target)."""
    task = watched(asked.task.resolve(), asked.changes, Seen())
    dataset: Any = task.data("train", asked.data)
    samples = Keyed(dataset, seed=task.seed).__getitems__([(0, i) for i in range(len(dataset))])
    return tuple((inputs, target) for inputs, (target, _) in samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """What goes through the model at once."""

    place: int
    """Which of its slice's pieces it is."""
    ids: np.ndarray
    inputs: Any
    targets: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batch:
    ways: tuple[tuple[_Rows, ...], ...]
    """By slice and piece, without empty ones."""
    count: float | Tensor


class _Order:
    """The batches of a trial, loaded."""

    def __init__(self, task: Task, asked: Asked, device: torch.device) -> None:
        self._task, self._asked, self._device = task, asked, device
        self._dataset: Any = task.data("train", asked.data)
        self._arrays = in_memory(self._dataset)
        self.length: int = len(self._dataset)  # type: ignore[arg-type]
        self.per_epoch = -(-self.length // task.batch_size)
        self.total = asked.given[0].total if asked.given else task.epochs * self.per_epoch

    def batch(self, number: int) -> _Batch:
        """The batch of step `number`, cut as asked for."""
        task, asked = self._task, self._asked
        if asked.given:
            epoch, ids = asked.given[number].epoch, np.array(asked.given[number].ids, dtype=np.int64)
        else:
            epoch, within = divmod(number, self.per_epoch)
            places = np.arange(within * task.batch_size, min((within + 1) * task.batch_size, self.length))
            ids = permute(places, key=mix(task.seed, epoch), length=self.length)
        ways = []
        for way in range(asked.ways):
            mine = ids[slice(*cut(len(ids), asked.ways, way))]
            pieces = [mine[slice(*cut(len(mine), asked.pieces, piece))] for piece in range(asked.pieces)]
            ways.append(tuple(self._load(epoch, i, piece) for i, piece in enumerate(pieces) if len(piece)))
        return _Batch(ways=tuple(ways), count=self._count(ways, number, len(ids)))

    def _load(self, epoch: int, place: int, ids: np.ndarray) -> _Rows:
        if self._arrays is not None:
            inputs, targets = self._arrays.gather(ids, self._device)
        else:
            samples = Keyed(self._dataset, seed=self._task.seed).__getitems__([(epoch, int(i)) for i in ids])
            inputs, targets = tree_map(self._here, self._task.collate(samples))
        if overrides(self._task, "augment"):
            keys = torch.from_numpy(sample_keys(self._task.seed, epoch, ids)).to(self._device)
            inputs, targets = self._task.augment(inputs, targets, keys)
        return _Rows(place=place, ids=ids, inputs=inputs, targets=targets)

    def _here(self, leaf: Any) -> Any:
        return leaf.to(self._device) if isinstance(leaf, Tensor) else leaf

    def _count(self, ways: Sequence[Sequence[_Rows]], number: int, samples: int) -> float | Tensor:
        if self._asked.given:
            return self._asked.given[number].count
        counts = [self._task.counts(rows.targets) for way in ways for rows in way]
        known = [one.float().sum() for one in counts if one is not None]
        return torch.stack(known).sum() if known else float(samples)


class _Model:
    """A model and its optimizer, trained by hand; one more model for each further slice, of the same parameters."""

    def __init__(self, task: Task, asked: Asked, weights: Weights, device: torch.device, total: int) -> None:
        self._task, self._asked, self._device = task, asked, device
        self.model = task.model().to(device).train()
        with torch.no_grad():
            for name, tensor in named_tensors(self.model).items():
                tensor.copy_(weights.read(name))
        self._models = [self.model, *(_with_own_buffers(self.model) for _ in range(asked.ways - 1))]
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._optimizer = task.optimizer(named)
        self._schedule = task.schedule(self._optimizer, total)
        self._autocast = autocast(asked.plan.precision, device) or contextlib.nullcontext()

    def step(self, number: int, batch: _Batch) -> tuple[float, float]:
        """The loss, and the gradient's norm before clipping."""
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        exact = self._asked.plan.exact
        for way, (model, pieces) in enumerate(zip(self._models, batch.ways, strict=True)):
            self._seed(number, way)
            for rows in pieces:
                if exact:
                    self._seed(number, rows.place)
                with self._autocast:
                    values = self._task.loss(model(rows.inputs), rows.targets)
                    counts = self._task.counts(rows.targets)
                weighted = (
                    values * counts if counts is not None else values * (len(rows.ids) / values.numel())
                )
                part = weighted.sum() / batch.count
                part.backward()
                total += part.detach()
        norm = self._clip()
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        return float(total), norm

    def _seed(self, number: int, part: int) -> None:
        torch.manual_seed(mix(self._task.seed, number, part))

    def _clip(self) -> float:
        # In float64: torch's float32 norm of 20 million numbers is wrong by a thousandth.
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = math.sqrt(sum(float(one.double().square().sum()) for one in gradients))
        assert self._task.clip is not None, "a watched task has a bound"
        if norm > self._task.clip:
            torch._foreach_mul_(gradients, self._task.clip / (norm + 1e-6))
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers on the CPU; the mean of the slices' buffers."""
        weights = {name: one.detach().cpu().clone() for name, one in self.model.named_parameters()}
        for name, buffer in self.model.named_buffers():
            alike = [dict(model.named_buffers())[name].cpu() for model in self._models]
            weights[name] = torch.stack(alike).mean(0) if buffer.is_floating_point() else alike[0].clone()
        return weights


def _with_own_buffers(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    modules = dict(other.named_modules())
    for name, module in model.named_modules():
        modules[name]._parameters = module._parameters
    return other


class _Twins:
    """The same training with the rows of each batch in other orders, and without draws, which belong to rows.

    Rows move in pairs: pairs are what a task may mix.
    """

    def __init__(self, another: Callable[[], _Model], drawing: bool) -> None:
        self._base = another() if drawing else None
        self._others = [another() for _ in ORDERS]

    def step(
        self, number: int, batch: _Batch, first: _Model, told: tuple[float, float]
    ) -> tuple[float, float, dict[str, float]]:
        """The largest relative differences of loss, norm and each tensor, over the orders."""
        [[rows]] = batch.ways
        loss_noise = norm_noise = 0.0
        noise: dict[str, float] = {}
        with Draws(off=True):
            if self._base is not None:
                told = self._base.step(number, batch)
            base = (self._base or first).weights()
            for reorder, other in zip(ORDERS, self._others, strict=True):
                moved = _Batch(ways=((_moved(rows, reorder),),), count=batch.count)
                loss, norm = other.step(number, moved)
                loss_noise = max(loss_noise, relative(told[0], loss))
                norm_noise = max(norm_noise, relative(told[1], norm))
                for name, tensor in other.weights().items():
                    noise[name] = max(noise.get(name, 0.0), gap(base[name], tensor))
        return loss_noise, norm_noise, noise


ORDERS: tuple[Callable[[list[int]], list[int]], ...] = (
    lambda pairs: pairs[::-1],
    lambda pairs: pairs[len(pairs) // 2 :] + pairs[: len(pairs) // 2],
)


def _moved(rows: _Rows, reorder: Callable[[list[int]], list[int]]) -> _Rows:
    size = len(rows.ids)
    places = [row for pair in reorder(list(range(0, size, 2))) for row in (pair, pair + 1) if row < size]
    index = torch.tensor(places)

    def move(leaf: Any) -> Any:
        fits = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size
        return leaf[index.to(leaf.device)] if fits else leaf

    inputs, targets = tree_map(move, (rows.inputs, rows.targets))
    return _Rows(place=0, ids=rows.ids[places], inputs=inputs, targets=targets)


def _probe(
    task: Task, order: _Order, device: torch.device, off: bool
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Which modules mix a batch's samples, and which operators draw, in one forward that leaves no trace."""
    torch.manual_seed(task.seed)
    model = task.model().to(device).train()
    rows = order.batch(0).ways[0][0]
    with Draws(off=off) as draws, torch.no_grad():
        model(rows.inputs)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    found = mixing_modules(model, rows.inputs, len(rows.ids))
    always = tuple(name for name, stops in found.items() if not stops)
    return {name: kinds[name] for name in found}, always, tuple(sorted(draws.seen))


def relative(a: float, b: float) -> float:
    """|a - b| / |a|; infinite where one is no number and the other is."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / (abs(a) or 1.0)
    return 0.0 if repr(a) == repr(b) else math.inf


def gap(a: Tensor, b: Tensor) -> float:
    """|a - b| / |a| in norms."""
    a, b = a.double(), b.double()
    return 0.0 if torch.equal(a, b) else float((a - b).norm() / (a.norm() or 1.0))
