"""Plain: the reference. One process and a loop written by hand, that shares no loop with any engine, and no feed.

What it has in common with a training is the initial weights, the order of the samples and the keys of their
randomness. Beside it run the same steps with each batch's rows in another order: how far these drift is what
rounding explains.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from grappe import world
from grappe.checkpoint.initial import built
from grappe.data.keyed import Keyed
from grappe.parity.changes import NO_CLIP, NOTHING, Changes, Seen, watched
from grappe.parity.draws import Draws
from grappe.parity.mixing import Company, mixing_modules
from grappe.parity.plain_batches import Given, Order
from grappe.parity.plain_model import Model
from grappe.parity.twins import Twins
from grappe.place import Place
from grappe.plan import Plan
from grappe.task import Task, overrides

ONE_PROCESS = Plan()


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
    always: tuple[Company, ...]
    """For those that mix them in evaluation too: the company to keep them in."""
    buffers: tuple[str, ...]
    augments: bool
    clips: bool


def worker(asked: Asked, place: Place, meet: Path) -> Reference:
    """The plain process."""
    here = world.join(Plan(device=asked.plan.device, threads=asked.plan.threads), place, meet)
    task = watched(asked.task.resolve(), asked.changes, Seen())
    order = Order(task, asked.data, here.device, ways=asked.ways, pieces=asked.pieces, given=asked.given)
    weights = built(task)
    probed = _probe(task, order, here.device, asked.changes.draws)

    def another() -> Model:
        return Model(task, asked.plan, weights, here.device, ways=asked.ways, total=order.total)

    first = another()
    twins = Twins(another, bool(probed.draws), probed.apart) if not asked.given else None
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
        draws=probed.draws,
        mixing=probed.mixing,
        always=probed.always,
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
class _Probed:
    """What one forward of the model tells, for a Reference."""

    draws: tuple[str, ...]
    mixing: dict[str, str]
    always: tuple[Company, ...]
    apart: bool


def _probe(task: Task, order: Order, device: torch.device, off: bool) -> _Probed:
    """Which modules mix a batch's samples, and which operators draw, in one forward that leaves no trace."""
    torch.manual_seed(task.seed)
    model = task.model().to(device).train()
    rows = order.batch(0).ways[0][0]
    with Draws(off=off) as draws, torch.no_grad():
        model(rows.inputs)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    mixing = mixing_modules(model, rows.inputs, len(rows.ids))
    return _Probed(
        draws=tuple(sorted(draws.seen)),
        mixing={name: kinds[name] for name in mixing.found},
        always=tuple(company for company in mixing.found.values() if company is not None),
        apart=mixing.apart,
    )
