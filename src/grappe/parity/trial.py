"""Trial: a few steps of a watched task under a plan, by any engine's interface alone, beside the plain process's."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from grappe import engines, world
from grappe.checkpoint.initial import built
from grappe.data.batch import Batch
from grappe.data.feed import training_feed
from grappe.engines.base import Engine, Setting
from grappe.loop import StepResult
from grappe.parity.changes import NOTHING, Changes, Seen, watched
from grappe.parity.draws import Draws
from grappe.parity.twins import gap
from grappe.place import Place
from grappe.plan import Plan
from grappe.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What the processes of a trial are to do."""

    task: Any
    """A TaskReference."""
    plan: Plan
    data: Path
    steps: int
    against: Path
    """Where the reference's weights behind each step are."""
    changes: Changes = NOTHING
    draws: bool = False
    """Whether the model draws random numbers, so that they are to be watched."""
    run: None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step under the plan."""

    epoch: int
    total: int
    """Steps that the schedule was made for."""
    slices: tuple[tuple[int, ...], ...]
    """By data slice: the ids of the samples that reached the loss."""
    count: float
    loss: float
    norm: float | None
    skipped: bool
    gaps: dict[str, float]
    """By tensor, |a - b| / |a| in norms, a the reference's."""
    draws: tuple[str, ...]
    """By data slice: a hash of what the model drew; empty where that was little or nothing."""
    bits: str
    """A hash of all weights and buffers behind it, and of the loss."""


def worker(asked: Asked, place: Place, meet: Path) -> tuple[Step, ...] | None:
    """One process of a trial; process 0 returns its steps. Collective."""
    here = world.join(asked.plan, place, meet)
    seen = Seen()
    task = watched(asked.task.resolve(), asked.changes, seen)
    feed = training_feed(task, task.data("train", asked.data), asked.plan, here)
    total = task.epochs * feed.ledger.steps_per_epoch
    setting = Setting(
        task=task, plan=asked.plan, world=here, weights=built(task), total_steps=total, flag=lambda: 0.0
    )
    engine = engines.check(asked.plan)(setting)
    watching = asked.changes.draws or (asked.draws and not asked.plan.compile)
    with Draws(off=asked.changes.draws) if watching else contextlib.nullcontext() as draws:
        notes = _Notes(engine, here, asked.against, seen, draws)
        batches = _unwatched(feed.batches(0, asked.steps), draws)
        engine.train(batches, notes.after)
    engine.close()
    steps = notes.gathered(here, total)
    here.barrier()
    here.leave()
    return steps if here.rank == 0 else None


def _unwatched(batches: Iterator[Batch], draws: Draws | None) -> Iterator[Batch]:
    """The same batches; what loading and augmentation draw is not the model's."""
    while True:
        with draws.paused() if draws is not None else contextlib.nullcontext():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


class _Notes:
    """What is written down behind each step, in this process."""

    def __init__(self, engine: Engine, here: World, against: Path, seen: Seen, draws: Draws | None) -> None:
        self._engine, self._here, self._against = engine, here, against
        self._seen, self._draws = seen, draws
        self._steps: list[dict[str, Any]] = []

    def after(self, result: StepResult) -> bool:
        """Collective, as exporting is."""
        batch = result.batch
        total, _ = result.sums.read()
        loss = total / float(batch.count)
        gaps, bits = self._compared(len(self._steps), loss)
        self._steps.append(
            {
                "epoch": batch.epoch,
                "ids": self._seen.take([micro.rows for micro in batch.microbatches]),
                "count": float(batch.count),
                "loss": loss,
                "norm": None if result.norm is None else float(result.norm),
                "skipped": result.skipped,
                "gaps": gaps,
                "bits": bits,
                "draws": self._draws.take() if self._draws is not None else "",
            }
        )
        return False

    @torch.no_grad()
    def _compared(self, number: int, loss: float) -> tuple[dict[str, float], str]:
        file = self._against / f"step-{number:03d}.safetensors"
        gaps: dict[str, float] = {}
        bits = hashlib.sha256(repr(loss).encode())
        if self._here.rank or not file.exists():
            for _ in self._engine.export():
                pass
            return {}, ""
        with safe_open(file, framework="pt") as reference:
            for name, tensor in self._engine.export():
                gaps[name] = gap(reference.get_tensor(name), tensor.detach().cpu())
                bits.update(
                    tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                )
        return gaps, bits.hexdigest()

    def gathered(self, here: World, total: int) -> tuple[Step, ...]:
        """The steps, with what each slice's processes saw. Collective."""
        mine = [(one["ids"], one["draws"]) for one in self._steps]
        # Of the processes that share a slice, a pipeline's last stage alone calls the loss.
        saw = sum(len(ids) for ids, _ in mine)
        everyone = here.gather((here.data_rank, -saw, here.rank, mine))
        best = {
            way: min((one for one in everyone if one[0] == way), key=lambda one: one[:3])
            for way, *_ in everyone
        }
        slices = [best[way][3] for way in sorted(best)]
        steps = []
        for number, one in enumerate(self._steps):
            told = [told[number] for told in slices]
            steps.append(
                Step(
                    **{name: value for name, value in one.items() if name not in ("ids", "draws")},
                    total=total,
                    slices=tuple(tuple(ids) for ids, _ in told),
                    draws=tuple(drawn for _, drawn in told),
                )
            )
        return tuple(steps)
