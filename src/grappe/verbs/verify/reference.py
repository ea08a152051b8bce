"""Reference: a training on one plain process, in a hand-written loop that shares no code with engines or loaders.

The reference shares with a training the initial weights, the order of the samples and the keys of their
randomness. It also runs the same steps with each batch's rows in other orders: their drift is the difference that
rounding explains.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from grappe.checkpoint.initial import built
from grappe.data.arrays import in_memory
from grappe.data.prepare import prepare
from grappe.data.rand_like import inside
from grappe.data.seeded import SeededDataset
from grappe.errors.user_code import naming_user_line
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World, join
from grappe.plan import Plan
from grappe.task import Task, overrides
from grappe.verbs.verify.batch_coupling import Companions, batch_coupled_modules
from grappe.verbs.verify.instrument import NO_CLIP, NOTHING, Instrumentation, SampleRecorder, instrumented
from grappe.verbs.verify.random_ops import RandomOps
from grappe.verbs.verify.reference_batches import RecordedBatch, ReferenceBatches
from grappe.verbs.verify.reference_model import ReferenceModel
from grappe.verbs.verify.rounding import RoundingTrial

ONE_PROCESS = Plan()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceRequest:
    """The input of the plain process."""

    task: Any
    """A TaskReference."""
    data: Path
    steps: int
    folder: Path
    """The folder for the weights after each step."""
    instrumentation: Instrumentation = NOTHING
    plan: Plan = ONE_PROCESS
    """The device, threads and precision."""
    slices: int = 1
    """Number of data slices of each batch, run one after the other, each with its own buffers and random streams."""
    pieces: int = 1
    """Number of microbatches of each slice."""
    recorded: tuple[RecordedBatch, ...] = ()
    perturbed: bool = False
    """Whether the noise is also that of parameters which are moved by their last bit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """One step of the plain process, and the difference that other orders of summation make."""

    ids: tuple[int, ...]
    loss: float
    norm: float
    loss_noise: float
    norm_noise: float
    noise: dict[str, float]
    """By tensor, |a - b| / |a| in norms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """The result of the plain process."""

    folder: Path
    steps: tuple[ReferenceStep, ...]
    per_epoch: int
    length: int
    draws: tuple[str, ...]
    """Operators of the model that draw random numbers."""
    coupled: dict[str, str]
    """Modules that couple a batch's samples, by name: their classes."""
    companions: tuple[Companions, ...]
    """Fixed samples for modules that couple samples in evaluation too, to accompany each row."""
    buffers: tuple[str, ...]
    augments: bool
    clips: bool
    whole_batch: bool
    """The task's `whole_batch_loss`: rows must not be separated."""


def worker(request: ReferenceRequest, process: ProcessRank, rendezvous_folder: Path) -> Reference:
    """Trains on the plain process, and returns what it recorded."""
    world = join(Plan(device=request.plan.device, threads=request.plan.threads), process, rendezvous_folder)
    plain = request.task.resolve()
    with naming_user_line(plain):
        return _trained(plain, request, world)


def _trained(plain: Task, request: ReferenceRequest, world: World) -> Reference:
    prepare(plain, request.data)  # here, before all other processes
    task = instrumented(plain, request.instrumentation, SampleRecorder())
    batches = ReferenceBatches(
        task,
        request.data,
        world.device,
        steps=request.steps,
        slices=request.slices,
        pieces=request.pieces,
        recorded=request.recorded,
    )
    weights = built(task)
    probe = _probe(task, batches, world.device, request.instrumentation.draws)

    def new_model(*, channels_last: bool = False) -> ReferenceModel:
        return ReferenceModel(
            task, request.plan, weights, world.device, slices=request.slices, total=batches.total,
            channels_last=channels_last,
        )  # fmt: skip

    model = new_model()
    rounding_trial = None
    if not request.recorded:
        rounding_trial = RoundingTrial(
            new_model,
            bool(probe.draws),
            probe.independent_rows,
            channels_last=request.plan.channels_last,
            perturbed=request.perturbed,
        )
    steps = []
    for number in range(request.steps):
        batch = batches.batch(number)
        with RandomOps(off=True) if request.instrumentation.draws else contextlib.nullcontext():
            loss, norm = model.step(number, batch)
        save_file(model.weights(), request.folder / f"step-{number:03d}.safetensors")
        noise = rounding_trial.step(number, batch, model, (loss, norm)) if rounding_trial else (0.0, 0.0, {})
        steps.append(
            ReferenceStep(
                ids=tuple(int(i) % batches.stored for pieces in batch.slices for rows in pieces for i in rows.ids),
                loss=loss, norm=norm, loss_noise=noise[0], norm_noise=noise[1], noise=noise[2],
            )
        )  # fmt: skip
    return Reference(
        folder=request.folder,
        steps=tuple(steps),
        per_epoch=batches.per_epoch,
        length=batches.length,
        draws=probe.draws,
        coupled=probe.coupled,
        companions=probe.companions,
        buffers=tuple(name for name, _ in model.model.named_buffers()),
        augments=overrides(task, "augment"),
        clips=task.clip != NO_CLIP,
        whole_batch=task.whole_batch_loss,
    )


def load(request: ReferenceRequest, process: ProcessRank, rendezvous_folder: Path) -> tuple[Any, ...]:
    """Loads a trial's samples, each once."""
    task = instrumented(request.task.resolve(), request.instrumentation, SampleRecorder())
    dataset: Any = task.data("train", request.data)
    samples = SeededDataset(dataset, seed=task.seed).__getitems__([(0, i) for i in range(len(dataset))])
    if in_memory(dataset) is not None:  # the ids are with the targets
        return tuple((inputs, target) for inputs, (target, _) in samples)
    return tuple(sample for sample, _ in samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Probe:
    """The result of one forward of the model."""

    draws: tuple[str, ...]
    coupled: dict[str, str]
    companions: tuple[Companions, ...]
    independent_rows: bool


def _probe(task: Task, batches: ReferenceBatches, device: torch.device, off: bool) -> _Probe:
    """Finds modules that couple a batch's samples, and operators that draw, in one forward of a separate model."""
    torch.manual_seed(task.seed)
    model = task.model().to(device).train()
    rows = batches.batch(0).slices[0][0]
    with RandomOps(off=off) as random_ops, torch.no_grad(), inside(rows.sample_ids):
        task.forward(model, rows.inputs)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    coupling = batch_coupled_modules(model, task.forward, rows.part, len(rows.ids))
    return _Probe(
        draws=tuple(sorted(random_ops.seen)),
        coupled={name: kinds[name] for name in coupling.modules},
        companions=tuple(one for one in coupling.modules.values() if one is not None),
        independent_rows=coupling.independent_rows and rows.cuttable,
    )
