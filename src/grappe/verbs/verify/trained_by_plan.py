"""Trains a few steps of an instrumented task under a plan, through the engine interface; compares with a reference."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from grappe import engines
from grappe.checkpoint.initial import built
from grappe.data.batch import Batch, rows_of_slices
from grappe.data.loader import training_loader
from grappe.engines.base import Engine, EngineSetup
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World, joined
from grappe.plan import Plan
from grappe.step.loss import StepResult
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


def worker(request: TrialRequest, process: ProcessRank, rendezvous_folder: Path) -> tuple[TrialStep, ...] | None:
    """Runs one process of a trial; process 0 returns its steps. Collective."""
    plan, off = request.plan, request.instrumentation.without_randomness
    samples, records = SampleRecorder(), list[dict[str, Any]]()
    task = instrumented(request.task.resolve(), request.instrumentation, samples)
    with joined(plan, process, rendezvous_folder) as world:
        loader = training_loader(task, task.data("train", request.data), plan, world)
        total = max(request.steps, task.epochs * loader.order.steps_per_epoch)
        setup = EngineSetup(
            task=task, plan=plan, world=world, weights=built(task), total_steps=total, sample_inputs=loader.example()
        )
        recording = off or (request.draws and not plan.compile)
        random_ops = RandomOps(off=off) if recording else None

        def unrecorded() -> Iterator[Batch]:
            """Yields the batches, without recording the random numbers of loading and augmentation."""
            batches = loader.batches(0, request.steps)
            while True:
                with random_ops.paused() if random_ops else contextlib.nullcontext():
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        def after(result: StepResult) -> bool:
            """Records a step. Collective, as exporting is."""
            batch = result.batch
            if task.whole_batch_loss:  # which may get the samples of all slices
                ids = samples.take([batch.samples])
                ids = [ids[row] for row in rows_of_slices(plan, batch.samples)[world.data_rank] if ids]
            else:
                ids = samples.take([micro.rows for micro in batch.microbatches])
            loss = result.sums.read()[0] / float(batch.count)
            file = request.reference / f"step-{len(records):03d}.safetensors"
            gaps, bits = _compared(engine, None if world.rank else file, loss)
            records.append(
                {
                    "epoch": batch.epoch,
                    "ids": ids,
                    "count": float(batch.count),
                    "loss": loss,
                    "norm": None if result.norm is None else float(result.norm),
                    "skipped": result.skipped,
                    "gaps": gaps,
                    "bits": bits,
                    "draws": random_ops.take() if random_ops else "",
                }
            )
            return False

        with engines.running(setup) as engine, random_ops or contextlib.nullcontext():
            engine.train(unrecorded(), after)
        slices = _by_slice(world, [(record.pop("ids"), record.pop("draws")) for record in records])
    if world.rank:
        return None
    return tuple(
        TrialStep(
            **record,
            total=total,
            slices=tuple(tuple(steps[number][0]) for steps in slices),
            draws=tuple(steps[number][1] for steps in slices),
        )
        for number, record in enumerate(records)
    )


@torch.no_grad()
def _compared(engine: Engine, file: Path | None, loss: float) -> tuple[dict[str, float], str]:
    """Computes the weights' gaps from a file's weights, and a hash of weights and loss. Collective, as exporting is."""
    gaps: dict[str, float] = {}
    bits = hashlib.sha256(repr(loss).encode())
    if file is None or not file.exists():
        for _ in engine.export():
            pass
        return {}, ""
    with safe_open(file, framework="pt") as reference:
        for name, exported in engine.export():
            tensor = exported.detach().cpu()
            gaps[name] = gap(reference.get_tensor(name), tensor)
            bits.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return gaps, bits.hexdigest()


def _by_slice(world: World, own: Sequence[tuple[list[int], str]]) -> list[Sequence[tuple[list[int], str]]]:
    """Gathers the steps' samples and draws of each data slice, which one process of it has recorded. Collective."""
    # Only a pipeline's last stage calls the loss, among the processes that share a slice.
    recorded = sum(len(ids) for ids, _ in own)
    everyone = world.gather((world.data_rank, -recorded, world.rank, own))
    best: dict[int, Any] = {}
    for record in sorted(everyone, key=lambda record: record[:3]):
        best.setdefault(record[0], record[3])
    return list(best.values())
