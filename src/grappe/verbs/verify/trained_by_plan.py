"""Trains a few steps of an instrumented task under a plan, through the engine interface; compares with a reference."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from grappe import engines
from grappe.checkpoint.initial import built
from grappe.data.batch import Batch
from grappe.data.loader import training_loader
from grappe.data.pieces import rows_of_slices
from grappe.engines.base import Engine, EngineSetup
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World, join
from grappe.plan import Plan
from grappe.step.reduction import StepResult
from grappe.task import Task
from grappe.verbs.verify.instrument import NOTHING, Instrumentation, SampleRecorder, instrumented
from grappe.verbs.verify.random_ops import RandomOps
from grappe.verbs.verify.trained_by_hand import gap


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """The input of a trial's processes."""

    task: Any
    """A TaskReference."""
    plan: Plan
    data: Path
    steps: int
    reference: Path
    """The folder of the reference's weights after each step."""
    instrumentation: Instrumentation = NOTHING
    draws: bool = False
    """Whether the model draws random numbers, which are then recorded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialStep:
    """One step under the plan."""

    epoch: int
    total: int
    """The total number of steps, for the schedule: at least as many as the trial has."""
    slices: tuple[tuple[int, ...], ...]
    """Ids of the samples that reached the loss, by data slice."""
    count: float
    loss: float
    norm: float | None
    skipped: bool
    gaps: dict[str, float]
    """By tensor, |a - b| / |a| in norms, a the reference's."""
    draws: tuple[str, ...]
    """Hash of the model's draws, by data slice; "" if there were few or none."""
    bits: str
    """A hash of all weights and buffers after the step, and of the loss."""


def worker(
    request: TrialRequest, process: ProcessRank, rendezvous_folder: Path
) -> tuple[TrialStep, ...] | None:
    """Runs one process of a trial; process 0 returns its steps. Collective."""
    world = join(request.plan, process, rendezvous_folder)
    samples = SampleRecorder()
    task = instrumented(request.task.resolve(), request.instrumentation, samples)
    loader = training_loader(task, task.data("train", request.data), request.plan, world)
    total = max(request.steps, task.epochs * loader.order.steps_per_epoch)
    setup = EngineSetup(
        task=task,
        plan=request.plan,
        world=world,
        weights=built(task),
        total_steps=total,
        stop_requested=lambda: 0.0,
    )
    engine = engines.check(request.plan)(setup)
    recording = request.instrumentation.without_randomness or (request.draws and not request.plan.compile)
    with (
        RandomOps(off=request.instrumentation.without_randomness)
        if recording
        else contextlib.nullcontext() as random_ops
    ):
        recorder = _StepRecorder(engine, task, request.plan, world, request.reference, samples, random_ops)
        batches = _unrecorded(loader.batches(0, request.steps), random_ops)
        engine.train(batches, recorder.after)
    engine.close()
    steps = recorder.gathered(world, total)
    world.barrier()
    world.leave()
    return steps if world.rank == 0 else None


def _unrecorded(batches: Iterator[Batch], random_ops: RandomOps | None) -> Iterator[Batch]:
    """Yields the same batches, without recording the random numbers of loading and augmentation."""
    while True:
        with random_ops.paused() if random_ops is not None else contextlib.nullcontext():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


class _StepRecorder:
    """Recorder of this process's steps."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        plan: Plan,
        world: World,
        reference: Path,
        samples: SampleRecorder,
        random_ops: RandomOps | None,
    ) -> None:
        self._engine, self._world, self._reference = engine, world, reference
        self._task, self._plan = task, plan
        self._samples, self._random_ops = samples, random_ops
        self._steps: list[dict[str, Any]] = []

    def after(self, result: StepResult) -> bool:
        """Records a step. Collective, as exporting is."""
        batch = result.batch
        total, _ = result.sums.read()
        loss = total / float(batch.count)
        gaps, bits = self._compared(len(self._steps), loss)
        self._steps.append(
            {
                "epoch": batch.epoch,
                "ids": self._ids(batch),
                "count": float(batch.count),
                "loss": loss,
                "norm": None if result.norm is None else float(result.norm),
                "skipped": result.skipped,
                "gaps": gaps,
                "bits": bits,
                "draws": self._random_ops.take() if self._random_ops is not None else "",
            }
        )
        return False

    def _ids(self, batch: Batch) -> list[int]:
        """Returns the ids of this slice's samples that reached the loss, which may get those of all slices."""
        if not self._task.whole_batch_loss:
            return self._samples.take([micro.rows for micro in batch.microbatches])
        ids = self._samples.take([batch.samples])
        return [ids[row] for row in rows_of_slices(self._plan, batch.samples)[self._world.data_rank] if ids]

    @torch.no_grad()
    def _compared(self, number: int, loss: float) -> tuple[dict[str, float], str]:
        file = self._reference / f"step-{number:03d}.safetensors"
        gaps: dict[str, float] = {}
        bits = hashlib.sha256(repr(loss).encode())
        if self._world.rank or not file.exists():
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

    def gathered(self, world: World, total: int) -> tuple[TrialStep, ...]:
        """Gathers the steps, with the samples and draws of each data slice. Collective."""
        own = [(record["ids"], record["draws"]) for record in self._steps]
        # Of the processes that share a slice, a pipeline's last stage alone calls the loss.
        recorded = sum(len(ids) for ids, _ in own)
        everyone = world.gather((world.data_rank, -recorded, world.rank, own))
        best = {
            rank: min((record for record in everyone if record[0] == rank), key=lambda record: record[:3])
            for rank, *_ in everyone
        }
        slices = [best[rank][3] for rank in sorted(best)]
        steps = []
        for number, record in enumerate(self._steps):
            in_slices = [recorded[number] for recorded in slices]
            steps.append(
                TrialStep(
                    **{name: value for name, value in record.items() if name not in ("ids", "draws")},
                    total=total,
                    slices=tuple(tuple(ids) for ids, _ in in_slices),
                    draws=tuple(drawn for _, drawn in in_slices),
                )
            )
        return tuple(steps)
