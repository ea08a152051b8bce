"""Runs the references and trials that a verdict needs; compares their differences with those of rounding alone.

A trial trains a few steps of an instrumented task under a plan, through the engine interface.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from grappe.data.batch import Batch, rows_of_slices
from grappe.data.loader import training_loader
from grappe.engines.base import Engine
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.step.loss import StepResult
from grappe.training.short_run import StartProcesses, TaskProcess, short_run
from grappe.training.task_reference import TaskReference
from grappe.verbs.verify import trained_by_hand
from grappe.verbs.verify.instrument import Instrumentation, SampleRecorder, instrumented
from grappe.verbs.verify.random_ops import RandomOps
from grappe.verbs.verify.trained_by_hand import (
    LOSS,
    NORM,
    Reference,
    ReferenceRequest,
    TrialStep,
    gap,
    relative,
)
from grappe.words import plan_name

BOUND = 0.02
"""Tolerance of loss or gradient norm above which agreement says nothing."""
FACTOR = 10.0
"""Tolerance over the difference that another order of the same sums makes."""


@dataclasses.dataclass(kw_only=True)
class TrialRunner:
    """Runs trainings of a few steps of one task, references and trials."""

    task: TaskReference
    data: Path
    steps: int
    folder: Path
    """An empty folder, for weights."""
    run: StartProcesses
    note: Callable[[str], None]
    """Called with a short description of the next training."""
    complain: Callable[[str], None] = lambda line: None
    """Called with a difference before its cause is looked for."""

    def __post_init__(self) -> None:
        self._references: dict[Any, Reference] = {}
        self._requests: dict[Path, ReferenceRequest] = {}

    def _run(self, work: Callable[[TaskProcess], Any], plan: Plan) -> Any:
        return short_run(work, self.task, plan, self.data, run=self.run)

    def reference(
        self,
        plan: Plan,
        instrumentation: Instrumentation,
        *,
        slices: int = 1,
        pieces: int = 1,
        precision: bool = False,
        recorded: tuple[TrialStep, ...] = (),
    ) -> Reference:
        """Runs one plain process on the plan's kind of device, once for the same arguments.

        Args:
            slices, pieces: the number of data slices and microbatches, run one after the other.
            precision: whether to train in the plan's precision, as always in fp64, instead of fp32.
            recorded: steps of a trial, whose samples replace the sample order's.
        """
        plain = Plan(
            device=plan.device,
            threads=plan.threads,
            precision=plan.precision if precision or plan.precision == "fp64" else "fp32",
            channels_last=plan.channels_last,  # counts as rounding: the plain process has torch's layout
            exact=pieces if plan.exact and pieces > 1 else 0,
            dropout="local" if slices * pieces > 1 and not plan.draws_whole_batches else "whole",
        )
        request = ReferenceRequest(
            steps=self.steps, folder=self.folder, instrumentation=instrumentation, plan=plain,
            slices=slices, pieces=pieces, recorded=recorded,
        )  # fmt: skip
        return self._reference(request, _titled("one plain process", instrumentation))

    def _reference(self, request: ReferenceRequest, words: str) -> Reference:
        # The samples are not hashable; the other fields determine them.
        without = dataclasses.replace(request.instrumentation, loaded_samples=())
        samples = (bool(request.instrumentation.loaded_samples), tuple(step.slices for step in request.recorded))
        key = dataclasses.replace(request, folder=self.folder, instrumentation=without, recorded=()), samples
        if key not in self._references:
            folder = self.folder / f"reference-{len(self._references)}"
            folder.mkdir()
            self.note(words)
            self._requests[folder] = request = dataclasses.replace(request, folder=folder)
            self._references[key] = self._run(functools.partial(trained_by_hand.trained, request), request.process)
        return self._references[key]

    def compare(
        self, reference: Reference, steps: Sequence[TrialStep], plan: Plan, without: Collection[str] = ()
    ) -> Difference:
        """Compares a trial with a reference; if weights alone differ, measures rounding more closely.

        Under domain= also if they alone differ at first: parts add up within each sample in another order, whose
        rounding other orders of the samples do not show, and Adam carries it on to the losses.
        """
        difference = compare(reference, steps, without=without)
        others = any(step[f"{name} excess"] > 1 for step in difference.steps for name in ("loss", "norm"))
        if difference.what != ("weights",) or (others and plan.domain == 1):
            return difference
        request = dataclasses.replace(self._requests[reference.folder], perturbed=True)
        closer = self._reference(request, "one plain process, with parameters moved by their last bit")
        return compare(reference, steps, tolerance=closer, without=without)

    def trial(self, plan: Plan, instrumentation: Instrumentation, reference: Reference) -> tuple[TrialStep, ...]:
        """Runs the plan's steps and compares them with a reference's."""
        self.note(_titled(plan_name(plan), instrumentation))
        arguments = (instrumentation, self.steps, reference.folder, bool(reference.draws))
        return self._run(functools.partial(trained_under_plan, *arguments), plan)

    def samples(self, plan: Plan, instrumentation: Instrumentation) -> tuple[Any, ...]:
        """Returns a trial's samples, each loaded once."""
        return self._run(functools.partial(trained_by_hand.load, instrumentation), Plan(device=plan.device))


SWITCH_NAMES = {
    "without_randomness": "random draws",
    "evaluated_modules": "statistics of the batch",
    "loss_row_by_row": "losses of several rows",
    "without_augmentation": "augmentation",
    "constant_buffers": "state in buffers",
    "in_float32": "reduced precision",
    "without_clipping": "clipping",
    "batch_multiple": "uneven slices",
    "loaded_samples": "loading",
}


def _titled(plan: str, instrumentation: Instrumentation) -> str:
    off = [words for name, words in SWITCH_NAMES.items() if getattr(instrumentation, name)]
    return f"{plan}, with {' and '.join(off)} switched off" if off else plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of a trial from the reference."""

    first: int | None
    """The first step (from 0) that differs by more than the tolerance; None: no step does."""
    what: tuple[str, ...]
    """The quantities that differ at that step."""
    loss: float
    norm: float | None
    weights: float
    tensor: str
    """The tensor with the largest difference, relative to its tolerance."""
    tolerance: float
    """The tolerance of that tensor, at the step where it differs most."""
    excess: float
    """The largest difference of all, as a multiple of its tolerance: above 1 is too much."""
    drifting: tuple[str, ...]
    """The tensors whose tolerance exceeds BOUND: their agreement says nothing."""
    steps: tuple[dict[str, float], ...]
    """By step: loss, reference loss, and the differences of loss, norm and weights with their tolerances."""

    @property
    def tolerated(self) -> float:
        """The largest difference of the loss, or of the gradient's norm, that is tolerated."""
        return max(step[f"{name} tolerated"] for step in self.steps for name in ("loss", "norm"))

    @property
    def agrees(self) -> bool:
        """Returns whether nothing differs by more than its tolerance."""
        return self.first is None


def compare(
    reference: Reference,
    steps: Sequence[TrialStep],
    tolerance: Reference | None = None,
    without: Collection[str] = (),
) -> Difference:
    """Computes the differences of `steps` from `reference`.

    Args:
        tolerance: the reference whose noise is used if `reference` has measured none.
        without: tensors that are not compared.
    """
    noise, floor = dict[str, float](), reference.floor
    rows, details = [], []
    for plain, step, others in zip(reference.steps, steps, (tolerance or reference).steps, strict=False):
        # The largest noise up to each step: diverged values may be close again by chance.
        noise = {name: max(value, noise.get(name, 0.0)) for name, value in others.noise.items()}
        gaps = {name: gap for name, gap in step.gaps.items() if name not in without}
        apart = {LOSS: relative(plain.loss, step.loss), **gaps}
        apart[NORM] = math.nan if step.norm is None else relative(plain.norm, step.norm)
        allowed = {name: max(floor, FACTOR * noise.get(name, 0.0)) for name in apart}
        worst = max(gaps, key=lambda name: gaps[name] / allowed[name], default="")
        row = {"plan's loss": step.loss, "reference's loss": plain.loss}
        for word, name in (("loss", LOSS), ("norm", NORM), ("weights", worst)):
            row[word], row[f"{word} tolerated"] = apart.get(name, 0.0), allowed.get(name, floor)
            row[f"{word} excess"] = row[word] / row[f"{word} tolerated"]
        row["excess"] = max(
            row["loss excess"], row["weights excess"], row["norm excess"] if step.norm is not None else 0
        )
        rows.append(row)
        details.append((gaps, allowed))
    first = next((number for number, row in enumerate(rows) if row["excess"] > 1), None)
    what: tuple[str, ...] = ()
    if first is not None:
        names = {"loss": "loss", "norm": "gradient norm", "weights": "weights"}
        what = tuple(word for name, word in names.items() if rows[first][f"{name} excess"] > 1)
    if first is None and len(steps) != len(reference.steps):
        first, what = min(len(steps), len(reference.steps)), ("number of steps",)
    drifting = tuple(name for name, value in noise.items() if FACTOR * value > BOUND and name not in (LOSS, NORM))
    gaps, allowed = details[max(range(len(rows)), key=lambda number: rows[number]["weights excess"])]
    shown = [name for name in gaps if name not in drifting or gaps[name] > allowed[name]] or list(gaps)
    tensor = max(shown, key=lambda name: gaps[name] / allowed[name], default="")
    norms = [row["norm"] for row in rows if not math.isnan(row["norm"])]
    return Difference(
        first=first,
        what=what,
        loss=max(row["loss"] for row in rows),
        norm=max(norms, default=None),
        weights=gaps.get(tensor, 0.0),
        tensor=tensor,
        tolerance=allowed.get(tensor, floor),
        excess=max(row["excess"] for row in rows),
        drifting=drifting,
        steps=tuple(rows),
    )


def trained_under_plan(
    instrumentation: Instrumentation, steps: int, reference: Path, draws: bool, process: TaskProcess
) -> tuple[TrialStep, ...]:
    """Runs one process of a trial; process 0 returns the steps of all. Collective.

    Args:
        reference: the folder of the reference's weights after each step.
        draws: whether the model draws random numbers, which are then recorded.
    """
    plan, world, off = process.plan, process.world, instrumentation.without_randomness
    samples, records = SampleRecorder(), list[TrialStep]()
    task = instrumented(process.task, instrumentation, samples)
    loader = training_loader(task, task.data("train", process.data), plan, world)
    total = max(steps, task.epochs * loader.order.steps_per_epoch)
    recording = off or (draws and not plan.compile)
    random_ops = RandomOps(off=off)

    batches = loader.batches(0, steps)

    def loaded() -> Batch | None:
        """Loads a batch, without recording the random numbers of loading and augmentation."""
        with random_ops.paused():
            return next(batches, None)

    def after(result: StepResult) -> bool:
        """Records a step. Collective, as exporting is."""
        batch = result.batch
        if task.whole_batch_loss:  # which may get the samples of all slices
            ids = samples.take([batch.samples])
            ids = [ids[row] for row in rows_of_slices(plan, batch.samples)[world.data_rank] if ids]
        else:
            ids = samples.take([micro.rows for micro in batch.microbatches])
        loss = result.sums.read()[0] / float(batch.count)
        file = reference / f"step-{len(records):03d}.safetensors"
        gaps, bits = _compared(engine, None if world.rank else file, loss)
        records.append(
            TrialStep(
                epoch=batch.epoch,
                total=total,
                slices=(tuple(ids),),
                count=float(batch.count),
                loss=loss,
                norm=None if result.norm is None else float(result.norm),
                gaps=gaps,
                draws=(random_ops.take(),),
                bits=bits,
            )
        )
        return False

    with process.engine(task, loader, total) as engine, random_ops if recording else contextlib.nullcontext():
        engine.train(iter(loaded, None), after)
    return _of_all_slices(world, records)


@torch.no_grad()
def _compared(engine: Engine, file: Path | None, loss: float) -> tuple[dict[str, float], str]:
    """Computes the weights' gaps from a file's weights, and a hash of weights and loss. Collective, as exporting is."""
    gaps: dict[str, float] = {}
    bits = hashlib.sha256(repr(loss).encode())
    if file is None or not file.exists():
        for _ in engine.train_state.export():
            pass
        return {}, ""
    with safe_open(file, framework="pt") as reference:
        for name, exported in engine.train_state.export():
            tensor = exported.detach().cpu()
            gaps[name] = gap(reference.get_tensor(name), tensor)
            bits.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return gaps, bits.hexdigest()


def _of_all_slices(world: World, own: Sequence[TrialStep]) -> tuple[TrialStep, ...]:
    """Returns this process's steps with the samples and draws of all data slices. Collective."""
    # Only a pipeline's last stage calls the loss, among the processes that share a slice.
    recorded = sum(len(step.slices[0]) for step in own)
    slices: dict[int, Sequence[TrialStep]] = {}
    gathered = world.gather((world.data_rank, -recorded, world.rank, own))
    for data_rank, _, _, steps in sorted(gathered, key=lambda each: each[:3]):
        slices.setdefault(data_rank, steps)
    return tuple(
        dataclasses.replace(
            own[number],
            slices=tuple(steps[number].slices[0] for steps in slices.values()),
            draws=tuple(steps[number].draws[0] for steps in slices.values()),
        )
        for number in range(len(own))
    )
