"""Trains on one plain process, in a hand-written loop that shares no code with engines or loaders.

This reference shares with a training the initial weights, the order of the samples and the keys of their
randomness; it loads the batches itself. It also runs the same steps with each batch's rows in other orders: their
drift is the difference that rounding explains.

Shapes: a batch of B samples in data slices of one piece (microbatch) or more; B rows in all.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from grappe.checkpoint.initial import built
from grappe.checkpoint.weights import Weights, named_tensors
from grappe.data.arrays import in_memory, with_copies
from grappe.data.batch import BatchRows, SampleIds, inside, stored_in
from grappe.data.collate import augment, collated, in_float64
from grappe.data.datasets import drawn_samples
from grappe.data.device_copy import on_device
from grappe.data.draw import mix, permute, sample_keys
from grappe.data.loader import in_channels_last
from grappe.data.sampling import cut
from grappe.data.seeded import SeededDataset
from grappe.data.whole_batch_draws import whole_batch_draws
from grappe.engines.shared.after_step import WORD
from grappe.engines.shared.carried import CarriedState, attributes_kept, has_rows
from grappe.engines.shared.watched_forward import sets_before_reads, writes_seen
from grappe.errors import DivergedError
from grappe.optimizers.common import begin_training
from grappe.parallel.batchnorm import kept_buffers, replace_buffers
from grappe.plan import Plan
from grappe.private_api.torch import module_parameters, tree_leaves, tree_map
from grappe.step.closure import needs_closure, step_with_closure
from grappe.step.loss import LossValues, loss_of
from grappe.step.precision import autocast, in_double, set_gpu_arithmetic
from grappe.step.task_contract import optimizer_of, schedule_of
from grappe.task import Task, overrides
from grappe.training.short_run import TaskProcess
from grappe.verbs.verify.instrument import (
    NO_CLIP,
    NOTHING,
    Instrumentation,
    SampleRecorder,
    all_rows,
    batch_coupling,
    instrumented,
)
from grappe.verbs.verify.random_ops import RandomOps

Reorder = Callable[[list[int]], list[int]]
Take = Callable[[list[int]], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PieceRows:
    """One piece: the rows that run through the model at once."""

    piece: int
    """The piece's number in its slice."""
    place: BatchRows
    sample_ids: SampleIds
    inputs: Any
    targets: Any

    take: Take
    """The inputs and targets of the rows at some places, in that order, as a batch of their own."""
    cuttable: bool
    """Whether inputs and targets are tensors with a row for each sample, and nothing else."""

    @property
    def ids(self) -> np.ndarray:
        """Returns the samples' ids, int64 (B,)."""
        return self.sample_ids.ids

    def part(self, first: int, last: int) -> Any:
        """Returns the inputs of rows `first` to `last` - 1."""
        return self.take(list(range(first, last)))[0]

    def reordered(self, reorder: Reorder) -> PieceRows:
        """Returns the same rows in another order, pair by pair, since a task may mix pairs."""
        size = len(self.ids)
        # A row without a partner stays last: in front, it would part all the others.
        pairs = reorder(list(range(0, size - 1, 2)))
        places = [row for pair in pairs for row in (pair, pair + 1)] + ([size - 1] if size % 2 else [])
        inputs, targets = self.take(places)
        return dataclasses.replace(
            self,
            sample_ids=self.sample_ids._replace(ids=self.ids[places]),
            inputs=inputs,
            targets=targets,
            take=lambda chosen: self.take([places[place] for place in chosen]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceBatch:
    """The rows of one step."""

    slices: tuple[tuple[PieceRows, ...], ...]
    """Rows by slice and piece, without empty pieces."""
    count: float | Tensor
    counts: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """The global count of each of several losses that have counts of their own."""

    def reordered(self, reorder: Reorder | None) -> ReferenceBatch:
        """Returns the same batch with each piece's rows in another order; None: as it is."""
        if reorder is None:
            return self
        slices = tuple(tuple(rows.reordered(reorder) for rows in pieces) for pieces in self.slices)
        return dataclasses.replace(self, slices=slices)


class ReferenceBatches:
    """Loads the batches of a trial, whose steps may go beyond the end of the training."""

    def __init__(self, task: Task, request: ReferenceRequest, process: TaskProcess) -> None:
        self._task, self._device = task, process.world.device
        self._slices, self._pieces, self._recorded = request.slices, request.pieces, request.recorded
        self._kind = stored_in(request.plan)
        self._dataset: Any = task.data("train", process.data)
        self._drawn = drawn_samples(task, self._dataset)
        if self._drawn is not None:
            self._dataset = with_copies(self._dataset)
        self._arrays = in_memory(self._dataset)
        self.stored = len(self._dataset)  # type: ignore[arg-type]
        """Samples of the dataset; `length` is how many of them an epoch has."""
        self.length: int = self.stored if self._drawn is None else self._drawn.samples
        self.per_epoch = -(-self.length // task.batch_size)
        self.total = self._recorded[0].total if self._recorded else max(request.steps, task.epochs * self.per_epoch)

    def batch(self, number: int) -> ReferenceBatch:
        """Loads the batch of step `number`, cut into slices and pieces."""
        task = self._task
        if self._recorded:
            step = self._recorded[number]
            epoch, ids = step.epoch, np.concatenate([np.array(each, dtype=np.int64) for each in step.slices])
        else:
            epoch, within = divmod(number, self.per_epoch)
            start, stop = within * task.batch_size, min((within + 1) * task.batch_size, self.length)
            ids = (
                permute(np.arange(start, stop), key=mix(task.seed, epoch), length=self.length)
                if self._drawn is None
                else self._drawn.order(task.seed, epoch, start, stop, task.batch_size)
            )
        slices = []
        for index in range(self._slices):
            begin, end = cut(len(ids), self._slices, index)
            pieces = [
                self._load(epoch, piece, ids, begin + first, begin + last)
                for piece in range(self._pieces)
                for first, last in [cut(end - begin, self._pieces, piece)]
                if last > first
            ]
            slices.append(tuple(pieces))
        counts = [self._task.counts(rows.targets) for pieces in slices for rows in pieces]
        plain = [count.to(self._kind).sum() for count in counts if isinstance(count, Tensor)]
        named = [count for count in counts if isinstance(count, Mapping)]
        count = torch.stack(plain).sum() if plain else float(len(ids))
        if isinstance(count, Tensor) and not count:
            count = torch.ones_like(count)  # nothing counts, so nothing is learned
        return ReferenceBatch(
            slices=tuple(slices),
            count=self._recorded[number].count if self._recorded else count,
            counts={
                name: torch.stack([count[name].to(self._kind).sum() for count in named]).sum()
                for name in (named[0] if named else ())
            },
        )

    def _load(self, epoch: int, piece: int, everyone: np.ndarray, first: int, last: int) -> PieceRows:
        """Loads each of the samples once, and puts them together."""
        ids = everyone[first:last]
        arrays, everything = self._arrays, list(range(len(ids)))
        if arrays is None:
            seeded = SeededDataset(self._dataset, seed=self._task.seed)
            samples = seeded.__getitems__([(epoch, int(i)) for i in ids])

        def collate(places: list[int]) -> tuple[Any, Any]:
            if arrays is not None:
                return arrays.gather(ids[places], self._device)
            batch = collated(self._task, [copy.deepcopy(samples[place]) for place in places])
            return tree_map(lambda leaf: on_device(leaf, self._device), batch)

        def augmented(batch: tuple[Any, Any], places: list[int]) -> tuple[Any, Any]:
            if overrides(self._task, "augment"):
                keys = torch.from_numpy(sample_keys(self._task.seed, epoch, ids[places])).to(self._device)
                batch = augment(self._task, *batch, keys)
            return in_float64(batch) if self._kind == torch.float64 else batch

        plain = collate(everything)
        inputs, targets = augmented(plain, everything)
        cuttable = all_rows((plain, inputs, targets), len(ids))
        if cuttable:  # if collating the samples in another order puts the rows of each tensor into that order
            places = everything[::-1]
            expected, leaves = tree_leaves(_taken(plain, places)), tree_leaves(collate(places))
            cuttable = len(expected) == len(leaves) and all(
                isinstance(b, Tensor) and torch.equal(a, b) for a, b in zip(expected, leaves, strict=True)
            )
        # A graph's nodes and a list of boxes keep their order: only whole samples can be reordered.
        cut_rows = functools.partial(_taken, (inputs, targets))
        return PieceRows(
            piece=piece,
            place=BatchRows(first, len(ids), len(everyone)),
            sample_ids=SampleIds(self._task.seed, epoch, ids),
            inputs=inputs,
            targets=targets,
            take=cut_rows if cuttable else lambda places: augmented(collate(places), places),
            cuttable=cuttable,
        )


def _taken(batch: tuple[Any, Any], places: list[int]) -> tuple[Any, Any]:
    index = torch.tensor(places)
    return tree_map(lambda leaf: leaf[index.to(leaf.device)], batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """A way in which the same training is rounded otherwise."""

    reorder: Reorder | None = None
    """The order of the pairs of rows in each piece; None: they stay in their places."""
    parts: int = 1
    sums: int = 1
    """The numbers of parts of the rows, and of partial sums of the losses; see `ReferenceModel.step`."""
    channels_last: bool = False
    """Whether images are laid out channels last, whose kernels add up in an order of their own."""
    seed: int | None = None
    """Seed of the noise that moves each initial parameter by about its last bit; None: none does.

    Another order reaches few of the places where rounding decides: a ReLU's input that is nearly 0.
    """


ORDERS = (
    Rounding(reorder=lambda pairs: pairs[::-1], parts=2, sums=2),
    Rounding(reorder=lambda pairs: pairs[len(pairs) // 2 :] + pairs[: len(pairs) // 2], parts=8, sums=3),
)
PERTURBED = tuple(Rounding(seed=seed) for seed in range(4))
PLAIN = Rounding()


class ReferenceModel:
    """Trains a model by hand; each further data slice has a model of its own, with the same parameters.

    Args:
        request: its plan gives the precision, and whether each piece or slice has a random stream of its own.
        total: the number of steps, for the schedule.
    """

    def __init__(
        self,
        task: Task,
        request: ReferenceRequest,
        weights: Weights,
        device: torch.device,
        total: int,
        rounding: Rounding = PLAIN,
    ) -> None:
        self._task, self._exact, self._device = task, bool(request.plan.exact), device
        self._draws_whole = request.plan.dropout == "whole" and not self._exact
        self._channels_last = rounding.channels_last
        self._kind = stored_in(request.plan)
        self.model = task.model().to(device).train()
        if self._kind == torch.float64:
            self.model.double()
        if rounding.channels_last:
            self.model.to(memory_format=torch.channels_last)  # pyrefly: ignore
        with torch.no_grad():
            for name, tensor in named_tensors(self.model).items():
                tensor.copy_(weights.read(name))
            if rounding.seed is not None:
                generator = torch.Generator().manual_seed(rounding.seed)
                for parameter in self.model.parameters():
                    move(parameter, generator)
        self.recorder: RandomOps | None = None
        self.draws: tuple[str, ...] = ()
        """Hash of the last step's draws, by slice."""
        self._models = [self.model]
        for _ in range(request.slices - 1):  # with the same parameters, and buffers of their own
            other = copy.deepcopy(self.model)
            modules = dict(other.named_modules())
            for name, module in self.model.named_modules():
                module_parameters(modules[name]).update(module_parameters(module))
            self._models.append(other)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._optimizer = optimizer_of(task, named, closures=True)
        begin_training(self._optimizer)
        self._schedule = schedule_of(task, self._optimizer, total)
        self._autocast = autocast(request.plan.precision, device)

    def step(self, number: int, batch: ReferenceBatch, parts: int = 1, sums: int = 1) -> tuple[float, float]:
        """Takes a step; returns the loss, and the gradient's norm before clipping.

        Args:
            parts: the number of parts in which the rows run through the model, to change only the rounding.
            sums: the number of partial sums of the losses, each with its own backward, to change only the rounding.
        """
        results: list[tuple[float, float]] = []

        def compute() -> float:
            results.append(self._gradients(number, batch, parts, sums))
            return results[-1][0]

        if needs_closure(self._optimizer):
            step_with_closure(self._optimizer, compute)
        else:
            compute()
            self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        if overrides(self._task, "after_step"):
            torch.manual_seed(mix(self._task.seed, number, WORD))
            with torch.no_grad():
                self._task.after_step(self.model)
        return results[0]

    def _gradients(self, number: int, batch: ReferenceBatch, parts: int, sums: int) -> tuple[float, float]:
        """Leaves the clipped gradients on the parameters; returns the loss, and the norm before clipping."""
        self._optimizer.zero_grad()
        total = torch.zeros((), dtype=self._kind, device=self._device)
        draws = []
        for index, (model, pieces) in enumerate(zip(self._models, batch.slices, strict=True)):
            torch.manual_seed(mix(self._task.seed, number, index))
            # A loss of the whole batch gets the outputs of all pieces.
            for together in [pieces] if self._task.whole_batch_loss else [(rows,) for rows in pieces]:
                outputs = []
                for rows in together:
                    if self._exact or self._draws_whole:
                        torch.manual_seed(mix(self._task.seed, number, rows.piece if self._exact else 0))
                    with self._around(rows):
                        output = self._in_parts(model, rows, parts) if parts > 1 else self._call(model, rows.inputs)
                    outputs.append(output)
                targets = tree_map(_all_rows_of, *[rows.targets for rows in together])
                with self._around(together[0]) if len(together) == 1 else self._autocast:
                    losses = loss_of(self._task, tree_map(_all_rows_of, *outputs), targets)
                    counts = self._task.counts(targets)
                weighted = _weighted(losses, counts, sum(len(rows.ids) for rows in together), batch)
                for part in weighted.tensor_split(sums):
                    share = part.sum() / batch.count
                    share.backward(retain_graph=sums > 1)
                    total += share.detach()
            draws.append("" if self.recorder is None else self.recorder.take())
        self.draws = tuple(draws)
        # In float64: torch's float32 norm of 20 million numbers is wrong by a thousandth.
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = math.sqrt(sum(float(in_double(gradient).square().sum()) for gradient in gradients))
        assert self._task.clip is not None, "a watched task has a bound"
        if norm > self._task.clip:
            for gradient in gradients:
                gradient.mul_(self._task.clip / (norm + 1e-6))
        if not math.isfinite(float(total)):
            ids = [int(sample) for pieces in batch.slices for rows in pieces for sample in rows.ids]
            shown = ", ".join(map(str, ids[:16])) + (", …" if len(ids) > 16 else "")
            raise DivergedError(
                f"the loss is {float(total)} on one plain process, in step {number + 1} (sample ids "
                f"{shown}): nothing can be compared. Try a lower lr, clip=1, or look at those samples"
            )
        return float(total), norm

    @contextlib.contextmanager
    def _around(self, rows: PieceRows) -> Iterator[None]:
        """Context of the rows' forward and loss."""
        place = rows.place if self._draws_whole else None
        with self._autocast, inside(rows.sample_ids), whole_batch_draws(place):
            yield

    def _call(self, model: nn.Module, inputs: Any) -> Any:
        return self._task.forward(model, in_channels_last(inputs) if self._channels_last else inputs)

    def _in_parts(self, model: nn.Module, rows: PieceRows, parts: int) -> Any:
        """Computes the model's output of all rows in parts; its buffers end as after all rows at once."""
        before = kept_buffers(model)
        with torch.no_grad():
            full = self._call(model, rows.inputs)
        after = kept_buffers(model)
        outputs = []
        for first, last in (cut(len(rows.ids), parts, part) for part in range(parts)):
            if last > first:
                replace_buffers(before)
                with inside(rows.sample_ids._replace(ids=rows.ids[first:last])):
                    outputs.append(self._call(model, rows.part(first, last)))
        replace_buffers(after)
        return tree_map(_joined, full, *outputs)

    def weights(self) -> dict[str, Tensor]:
        """Returns parameters, and the mean of the slices' buffers, on the CPU."""
        weights = {name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()}
        for name, buffer in self.model.named_buffers():
            alike = [dict(model.named_buffers())[name].cpu() for model in self._models]
            weights[name] = torch.stack(alike).mean(0) if buffer.is_floating_point() else alike[0].clone()
        return weights


def _weighted(losses: LossValues, counts: Any, rows: int, batch: ReferenceBatch) -> Tensor:
    """Returns a piece's weighted values: over the whole batch they sum to its mean loss times its count."""
    if isinstance(counts, Mapping):
        # A loss in which nothing counts adds nothing.
        factors = {name: batch.count / count if count else 0.0 for name, count in batch.counts.items()}
        return torch.cat([(losses.named[name] * count * factors[name]).flatten() for name, count in counts.items()])
    if counts is not None:
        return losses.values * counts
    return losses.values.reshape(-1) * (rows / losses.values.numel())


def _all_rows_of(first: Any, *others: Any) -> Any:
    """Joins a leaf of the pieces' outputs or targets by rows; what has no rows is the first's."""
    joined = bool(others) and isinstance(first, Tensor) and bool(first.dim())
    return torch.cat([first, *others]) if joined else first


def _joined(full: Any, *parts: Any) -> Any:
    """Joins a leaf of the parts' outputs by rows, padded as in `full`; a leaf without rows stays as it is."""
    if not isinstance(full, Tensor) or not full.dim() or parts[0].shape == full.shape:
        return parts[0]
    rows = list(full.split([len(part) for part in parts]))
    for index, part in enumerate(parts):
        if part.shape != rows[index].shape:  # it is padded to its own longest sequence
            padded = rows[index].clone()
            padded[tuple(map(slice, part.shape))] = part
            rows[index] = padded
        else:
            rows[index] = part
    return torch.cat(rows)


def rounding_noise(
    number: int,
    batch: ReferenceBatch,
    drawn: tuple[float, float, dict[str, Tensor]],
    base: ReferenceModel | None,
    others: Sequence[tuple[Rounding, ReferenceModel]],
    *,
    off: bool,
    independent_rows: bool,
) -> dict[str, float]:
    """Computes the largest relative differences of LOSS, NORM and each tensor, if a step is rounded otherwise.

    Rows move in pairs, since a task may mix pairs, and without random draws, which belong to rows. If the model does
    not couple rows, they run through it in parts, else the gradients of partial sums of losses are added: some
    differences (of a bias whose gradient is only rounding, which Adam divides by its own size) appear only then. The
    loss gets all rows at once.

    Args:
        drawn: the step's loss, norm and weights.
        base: takes the steps without random draws; None: the training has none.
        others: the ways in which it is rounded otherwise, each with a model of its own.
        off: whether draws are switched off in the training itself.
    """
    with RandomOps(off=True):
        reordered = drawn if base is None else (*base.step(number, batch), base.weights())
    noise: dict[str, float] = {}
    for rounding, other in others:
        # Rows that stay in their places have the training's own draws: what these put to 0 may decide a tie.
        stays = rounding.reorder is None
        expected_loss, expected_norm, expected = drawn if stays else reordered
        cut = {"parts": rounding.parts} if independent_rows else {"sums": rounding.sums}
        with RandomOps(off=True) if off or not stays else contextlib.nullcontext():
            loss, norm = other.step(number, batch.reordered(rounding.reorder), **cut)
        apart = {name: gap(expected[name], tensor) for name, tensor in other.weights().items()}
        apart |= {LOSS: relative(expected_loss, loss), NORM: relative(expected_norm, norm)}
        noise = {name: max(value, noise.get(name, 0.0)) for name, value in apart.items()}
    return noise


LOSS, NORM = "the loss", "the gradient's norm"
"""Names of the two among those of tensors."""


def relative(a: float, b: float) -> float:
    """Computes |a - b| / |a|; infinity if exactly one is not a number."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / (abs(a) or 1.0)
    return 0.0 if repr(a) == repr(b) else math.inf


def gap(a: Tensor, b: Tensor) -> float:
    """Computes |a - b| / |a| in norms; infinity where it is not a number."""
    a, b = in_double(a), in_double(b)
    apart = 0.0 if torch.equal(a, b) else float((a - b).norm() / (a.norm() or 1.0))
    return math.inf if math.isnan(apart) else apart


def move(tensor: Tensor, generator: torch.Generator) -> None:
    """Moves each number at random by about its last bit."""
    tensor.mul_(1 + torch.finfo(tensor.dtype).eps * torch.randn(tensor.shape, generator=generator).to(tensor))


FLOORS = {torch.float32: 1e-5, torch.float64: 1e-10}
"""The least difference that is tolerated per tensor, in norm, by the parameters' type: contract 7."""


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
    gaps: dict[str, float]
    """By tensor, |a - b| / |a| in norms, a the reference's."""
    draws: tuple[str, ...]
    """Hash of the model's draws, by data slice; "" if there were few or none."""
    bits: str
    """A hash of all weights and buffers after the step, and of the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceRequest:
    """The steps that the plain process takes."""

    steps: int
    folder: Path
    """The folder for the weights after each step."""
    instrumentation: Instrumentation = NOTHING
    plan: Plan = dataclasses.field(default_factory=Plan)
    """The device, threads and precision."""
    slices: int = 1
    """Number of data slices of each batch, run one after the other, each with its own buffers and random streams."""
    pieces: int = 1
    """Number of microbatches of each slice."""
    recorded: tuple[TrialStep, ...] = ()
    """Steps of a trial, whose samples replace the sample order's."""
    perturbed: bool = False
    """Whether the noise includes models whose parameters were moved by their last bit."""

    @property
    def process(self) -> Plan:
        """Returns the plan under which the plain process is started: precision is applied inside."""
        return Plan(device=self.plan.device, threads=self.plan.threads)

    def begin(self, process: TaskProcess) -> tuple[Task, ReferenceBatches, Callable[..., ReferenceModel]]:
        """Returns the instrumented task, its batches, and a function that makes models with the initial weights."""
        set_gpu_arithmetic(self.plan.precision)
        task = instrumented(process.task, self.instrumentation, SampleRecorder())
        batches = ReferenceBatches(task, self, process)
        return (
            task,
            batches,
            functools.partial(ReferenceModel, task, self, built(task), process.world.device, batches.total),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """One step of the plain process, and the difference that other orders of summation make."""

    ids: tuple[int, ...]
    loss: float
    norm: float
    noise: dict[str, float]
    """|a - b| / |a| of LOSS, NORM, and of each tensor in norms."""
    draws: tuple[str, ...] = ()
    """Hash of the model's draws, by slice; "" if there were few or none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """The result of the plain process."""

    folder: Path
    steps: tuple[ReferenceStep, ...]
    floor: float
    """The least difference that is tolerated."""
    per_epoch: int
    draws: tuple[str, ...]
    """Operators of the model that draw random numbers."""
    coupled: dict[str, str]
    """Computations over several samples of a batch: classes by modules' names, functions by the user's lines."""
    buffers: tuple[str, ...]
    augments: bool
    clips: bool
    whole_batch: bool
    """The task's `whole_batch_loss`: rows must not be separated."""
    written: tuple[str, ...]
    """Parameters that forward writes."""
    attributes: tuple[str, ...]
    """Attributes that forward changes for the next."""
    carries_rows: bool
    """Whether some of them have a row for each sample: a batch of another size would begin with others' rows."""


def trained(request: ReferenceRequest, process: TaskProcess) -> Reference:
    """Trains on the plain process, and returns what it recorded."""
    task, batches, new_model = request.begin(process)
    torch.manual_seed(task.seed)
    probe, rows = task.model().to(process.world.device).train(), batches.batch(0).slices[0][0]
    if stored_in(request.plan) == torch.float64:
        probe.double()
    written, carried, off = list[str](), CarriedState(), request.instrumentation.without_randomness
    with (
        RandomOps(off=off) as random_ops,
        torch.no_grad(),
        inside(rows.sample_ids),
        attributes_kept(probe),
    ):
        carried.begin(probe, Plan())
        with writes_seen(probe, lambda name, _: written.append(name)), sets_before_reads(probe) as unread:
            task.forward(probe, rows.inputs)
        changed = {place: value for place, value in carried.changed().items() if place not in unread}
    coupled, alone = batch_coupling(probe, task.forward, rows.part, len(rows.ids))

    model, roundings = new_model(), [*ORDERS]
    if random_ops.seen:
        model.recorder = RandomOps(off=off)
    roundings += [Rounding(channels_last=True)] if request.plan.channels_last else []
    roundings += PERTURBED if request.perturbed else ()
    base = new_model() if random_ops.seen and not request.recorded else None
    others = [] if request.recorded else [(rounding, new_model(rounding)) for rounding in roundings]
    # Parts are further forwards, which would change them further.
    independent = alone and rows.cuttable and not (written or changed)
    steps = []
    for number in range(request.steps):
        batch = batches.batch(number)
        with model.recorder or contextlib.nullcontext():
            loss, norm = model.step(number, batch)
        weights = model.weights()
        save_file(weights, request.folder / f"step-{number:03d}.safetensors")
        drawn = loss, norm, weights
        step = ReferenceStep(
            ids=tuple(int(i) % batches.stored for pieces in batch.slices for rows in pieces for i in rows.ids),
            loss=loss,
            norm=norm,
            noise=rounding_noise(number, batch, drawn, base, others, off=off, independent_rows=independent),
            draws=model.draws,
        )
        steps.append(step)
    return Reference(
        folder=request.folder,
        steps=tuple(steps),
        floor=FLOORS[stored_in(request.plan)],
        per_epoch=batches.per_epoch,
        draws=tuple(sorted(random_ops.seen)),
        coupled=dict(sorted(coupled.items())),
        buffers=tuple(name for name, _ in model.model.named_buffers()),
        augments=overrides(task, "augment"),
        clips=task.clip != NO_CLIP,
        whole_batch=task.whole_batch_loss,
        written=tuple(dict.fromkeys(written)),
        attributes=tuple(f"{path}.{name}".lstrip(".") for path, name in changed),
        carries_rows=any(has_rows(value, len(rows.ids)) for value in changed.values()),
    )


def load(instrumentation: Instrumentation, process: TaskProcess) -> tuple[Any, ...]:
    """Loads a trial's samples, each once."""
    task = instrumented(process.task, instrumentation, SampleRecorder())
    dataset: Any = task.data("train", process.data)
    samples = SeededDataset(dataset, seed=task.seed).__getitems__([(0, i) for i in range(len(dataset))])
    if in_memory(dataset) is not None:  # the ids are with the targets
        return tuple((inputs, target) for inputs, (target, _) in samples)
    return tuple(sample for sample, _ in samples)
