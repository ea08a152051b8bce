"""Turns a dataset and a sample order into this process's batches, on its device."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from grappe.data.arrays import in_memory, with_copies
from grappe.data.batch import (
    Batch,
    BatchRows,
    ExactPieces,
    Microbatch,
    SampleIds,
    counts_of,
    divided,
    inside,
    stored_in,
)
from grappe.data.collate import at_rows, augment, begins_with, collated, in_float64, row_shapes, takes_training
from grappe.data.datasets import training_order
from grappe.data.device_copy import copies_to, on_device, sent
from grappe.data.draw import sample_keys
from grappe.data.loading import Loading
from grappe.data.sampling import SampleOrder, cut
from grappe.data.seeded import SeededDataset, by_epoch
from grappe.data.source import Request, Samples, Source, Sources, for_threads
from grappe.data.stream import Stream, StreamBatches
from grappe.domain.batches import cut_batch
from grappe.errors import PlanError
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import tree_map
from grappe.profiling.phases import DATA, TRANSFER
from grappe.task import Task, overrides

MOST_PARTS = 4096  # of a batch of fewer samples: some parts are empty
_ENDLESS = 1 << 62  # steps: a stream is read ahead without knowing where a training stops

Fetch = Callable[[np.ndarray], tuple[Any, Any]]
"""Sample ids to a batch (inputs, targets)."""


class StepSlice(NamedTuple):
    """The samples of one step that belong to this process, cut into microbatches."""

    step: int
    epoch: int
    samples: int
    ids: np.ndarray
    pieces: tuple[np.ndarray, ...]
    """Sample ids by microbatch; an empty piece gets one padding row, whose weight is 0."""
    everyone: np.ndarray
    """The ids of the global batch."""
    places: tuple[BatchRows, ...]
    """Each piece's rows in the global batch."""

    def padded(self, ids: np.ndarray) -> np.ndarray:
        """Returns `ids`; without any, a padding row's, since a model cannot take an empty batch.

        It is the global batch's first sample, so that gradients of 0 are where others are.
        """
        return ids if len(ids) else self.everyone[:1]


class BatchLoader:
    """The batches of one split for this process.

    Args:
        training: whether to augment, and to compute the global count before the first backward.
    """

    def __init__(
        self, task: Task, dataset: Dataset, order: SampleOrder, plan: Plan, world: World, *, training: bool
    ) -> None:
        self.order = order
        self.dataset = dataset
        self._task, self._plan, self._world = task, plan, world
        self._training = training
        self._augments = overrides(task, "augment") and (training or takes_training(task))
        self._counts = overrides(task, "counts")
        self._parts = plan.microbatches if training else 1
        self._exact = ExactPieces.of(plan) if plan.exact else None
        self._places = plan.draws_whole_batches
        self._kind = stored_in(plan)
        self.phase: Callable[[int], None] | None = None  # called as a batch leaves and arrives
        self._arrays = in_memory(dataset)
        self.stream: StreamBatches | None = None
        self._cuts = plan.pipeline > 1 and self._parts > 1 and self._arrays is None
        own_collate = self._arrays is None and overrides(task, "collate") and not isinstance(dataset, Stream)
        self._may_pad = training and own_collate and plan.draws_whole_batches  # until a step shows whether it does
        self.collates_whole = False
        """Whether each process collates whole batches, since collate() pads a part of one to another length."""
        self.waited = 0.0
        """Seconds spent waiting for samples."""
        if self._arrays is not None:
            self._arrays.to_device(world.device)
            return
        if isinstance(dataset, Stream):
            self.stream = StreamBatches(dataset, task, plan, world)
            return
        seeded = SeededDataset(dataset, seed=order.seed)
        if plan.loading == "threads" and plan.workers != 0:
            for_threads(seeded)  # now, and not at the first evaluation
        pin = world.device.type == "cuda"
        self.sources = Sources(Samples(dataset=seeded, task=task, pin=pin, prefetch=plan.prefetch), plan, world)
        """Sources of samples that are not in memory."""

    def slices(self, start: int, stop: int) -> Iterator[StepSlice]:
        """Yields this process's part of steps `start` to `stop`, a pure function of the sample order."""
        size, bounds = 0, list[tuple[int, int]]()
        places: tuple[BatchRows, ...] = ()
        for first_step, epoch, block in self.order.blocks(start, stop):
            for step, row in enumerate(range(0, len(block), self.order.batch_size), first_step):
                everyone = block[row : row + self.order.batch_size]
                if len(everyone) != size:  # at the first step, and around an epoch's end
                    size = len(everyone)
                    bounds = self._bounds(size, self._world.data_rank)
                    places = tuple([BatchRows(a, max(1, b - a), size) for a, b in bounds])
                pieces = tuple([everyone[a:b] for a, b in bounds])
                ids = everyone[bounds[0][0] : bounds[-1][1]] if self._exact is None else np.concatenate(pieces)
                yield StepSlice(step, epoch, size, ids, pieces, everyone, places)

    def _bounds(self, size: int, rank: int) -> list[tuple[int, int]]:
        """Returns the begin and the end of each piece of data slice `rank` in the `size` rows of a global batch."""
        if self._exact is not None:
            return self._exact.spans(size, rank)
        first, last = cut(size, self._world.data_size, rank)
        cuts = [cut(last - first, self._parts, part) for part in range(self._parts)]
        return [(first + a, first + b) for a, b in cuts]

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Gives the batches of steps `start` to `stop`. Collective where the task counts its targets.

        Threads and worker processes are kept for the next call, once all batches were taken.
        """
        with inside(None):  # whatever is in the model when the batches end
            yield from self._made(start, stop)

    def _made(self, start: int, stop: int) -> Iterator[Batch]:
        if self._arrays is not None:
            for part in self.slices(start, stop):
                yield self._batch(part, self._gathered)
            return
        if (stream := self.stream) is not None:
            if stream.step < 0:
                self.begin_stream(start)
            assert stream.step == start, f"the stream is at step {stream.step}, not {start}"
            ranks = self._world.gather(self._world.data_rank)
            for part in self.slices(start, stop):
                rows = stream.rows([self._bounds(part.samples, rank) for rank in ranks])
                place = {number: row for row, number in enumerate(part.ids.tolist())}
                yield self._batch(
                    part,
                    lambda ids, rows=rows, place=place: stream.collate(
                        [rows[place[n]] for n in ids.tolist() if n in place] or rows[:1]
                    ),
                )
            return
        source, read_whole = self._begun(start, stop), self.collates_whole
        exhausted = False
        try:
            for part in self.slices(start, stop):
                batch = self._batch(part, lambda _, source=source: source.next())
                yield batch
                changes = self.sources.changes() or read_whole != self.collates_whole
                if part.step + 1 < stop and changes:
                    self.sources.end(source, exhausted=False)
                    source, read_whole = self._begun(part.step + 1, stop), self.collates_whole
            exhausted = True
        finally:
            self.sources.end(source, exhausted=exhausted)

    def begin_stream(self, start: int, saved: Mapping[str, Any] | None = None) -> None:
        """Begins to read the stream at step `start`, from where a checkpoint says it was. Collective."""
        assert self.stream is not None
        self.stream.begin(start, (part.samples for part in self.slices(start, _ENDLESS)), saved)

    def rehearsed(self, step: int = 0, *, apart: bool = False) -> Iterator[Batch]:
        """The batch of a step, loaded by this process: no workers are started for one. Collective.

        Args:
            apart: a child of this process loads it, so that a dataset that counts or draws is as before.
        """
        part = next(self.slices(step, step + 1))
        with inside(None):
            yield self._batch(part, self._loaded_here(part, apart=apart) if self._arrays is None else self._gathered)

    def _begun(self, start: int, stop: int) -> Source:
        """Begins to load the pieces of steps `start` to `stop`."""
        # Workers read ahead, so they have the order for themselves.
        return self.sources.begin(
            self._request(part, ids)
            for part in self.slices(start, stop)
            for ids in ((part.everyone,) if self.collates_whole else (part.ids,) if self._cuts else part.pieces)
        )

    def _loaded_here(self, part: StepSlice, *, apart: bool) -> Fetch:
        samples = self.sources.samples

        def fetch(ids: np.ndarray) -> tuple[Any, Any]:
            request = list(self._request(part, ids))
            if not apart:
                return samples.collate(samples.dataset.__getitems__(request))
            options: dict[str, Any] = {"collate_fn": samples.collate, "multiprocessing_context": "fork"}
            with offsets_kept():
                return next(iter(DataLoader(samples.dataset, batch_sampler=[request], num_workers=1, **options)))

        return fetch

    def _batch(self, part: StepSlice, fetch: Fetch) -> Batch:
        loaded = self._loaded(part, fetch)
        loaded = self._alike(part, list(loaded)) if self._may_pad else loaded
        placed = zip(part.places, loaded, strict=True)
        micros = tuple([self._microbatch(part, place, *piece) for place, piece in placed])
        count: float | Tensor = float(part.samples)
        if self._counts and self._training:
            count, micros = divided(micros, part.samples, self._exact, self._world.data_group)
        return Batch(part.epoch, part.step, micros, part.samples, count, part.ids)

    def example(self) -> Any:
        """Returns the inputs of the first sample or two, as a batch on the CPU."""
        return self.example_batch()[0]

    def example_batch(self) -> tuple[Any, Any]:
        """Returns the first sample or two, as a batch (inputs, targets) on the CPU."""
        ids = np.arange(min(2, len(self.dataset)))  # type: ignore[arg-type]
        if self._arrays is not None:
            inputs, targets = self._arrays.gather(ids, self._world.device)
        elif self.stream is not None:
            if self.stream.step < 0:
                self.begin_stream(0)
            ids = ids[: len(self.stream.example)]
            inputs, targets = self.stream.collate(self.stream.example)
        else:
            seeded = self.sources.samples.dataset
            inputs, targets = collated(self._task, [seeded[-1, int(index)] for index in ids])
        cpu = torch.device("cpu")
        if self._world.device != cpu:
            inputs, targets = tree_map(lambda leaf: on_device(leaf, cpu), (inputs, targets))
        if self._augments:  # a model may accept augmented samples only
            inputs, targets = self._augmented(inputs, targets, SampleIds(self.order.seed, -1, ids), cpu)
        return in_float64((inputs, targets)) if self._kind == torch.float64 else (inputs, targets)

    def _loaded(self, part: StepSlice, fetch: Fetch) -> Iterator[tuple[np.ndarray, Any, Any]]:
        """Each piece's sample ids, inputs and targets."""
        if self.collates_whole:
            batch = self._awaited(part.everyone, fetch)
            for ids, place in zip(part.pieces, part.places, strict=True):
                rows = range(place.first, place.first + place.size) if len(ids) else (0,)
                yield ids, *at_rows(batch, rows, part.samples)
            return
        if not self._cuts:
            for ids in part.pieces:
                yield ids, *self._awaited(part.padded(ids), fetch)
            return
        # The task's own collate pads all of a step's microbatches to one length, as a pipeline needs them.
        count, first, batch = max(1, len(part.ids)), 0, self._awaited(part.padded(part.ids), fetch)
        for ids in part.pieces:
            places = range(first, first + len(ids)) if len(ids) else (0,)
            yield ids, *at_rows(batch, places, count)
            first += len(ids)

    def _alike(self, part: StepSlice, pieces: list[tuple[np.ndarray, Any, Any]]) -> list[tuple[np.ndarray, Any, Any]]:
        """Returns a step's pieces, padded as one process pads them. Collective.

        Where collate() pads parts of a batch to several lengths, all of it is collated by each process, in this step
        and later: dropout's numbers depend on the shape. Where its rows are not the parts' with more padding, as
        collate() mixes samples or does not put the batch first, parts stay as they are: a checked step then says so.
        """
        shapes = {row_shapes(batch, max(1, len(ids))) for ids, *batch in pieces}
        same = len(shapes) == 1
        if self._world.size > 1:
            first = zlib.crc32(repr(shapes.pop()).encode())
            limits = torch.tensor([first, -first, not same])
            torch.distributed.all_reduce(limits, torch.distributed.ReduceOp.MAX, group=self._world.control)
            most, least, differ = limits.tolist()
            same = most == -least and not differ
        if same:
            return pieces
        self._may_pad, self.collates_whole, padded = False, True, pieces
        try:
            padded = list(self._loaded(part, self._loaded_here(part, apart=False)))
            more = all(begins_with(new, old) for new, old in zip(padded, pieces, strict=True))
        except PlanError:  # something has no row for each sample
            more = False
        self.collates_whole = all(self._world.gather(more))
        return padded if self.collates_whole else pieces

    def _awaited(self, ids: np.ndarray, fetch: Fetch) -> tuple[Any, Any]:
        began = time.perf_counter()
        inputs, targets = fetch(ids)
        self.waited += time.perf_counter() - began
        return inputs, targets

    def _gathered(self, ids: np.ndarray) -> tuple[Any, Any]:
        assert self._arrays is not None
        return self._arrays.gather(ids, self._world.device)

    def _request(self, part: StepSlice, ids: np.ndarray) -> Sequence[Request]:
        # Validation draws the same in every evaluation, so that losses can be compared.
        epoch = part.epoch if self._training else -1
        return [(epoch, index) for index in part.padded(ids).tolist()]

    @property
    def notes(self) -> Sequence[str]:
        """Returns what the user should know of the dataset."""
        if self.stream is not None:
            return self.stream.notes
        kinds = sorted({type(each).__name__ for each in by_epoch(self.dataset)})
        return [f"before each epoch, set_epoch(epoch) of {kind} is called" for kind in kinds]

    def remarks(self) -> Sequence[str]:
        """Returns what the user should know of a training's batches at its end."""
        if not self.collates_whole:
            return []
        return [
            "right, only slower: collate() pads, so each process loads whole batches, and so pads as one process does. "
            "dropout=local, or samples of one length, let a process load its samples alone"
        ]

    @property
    def loads(self) -> bool:
        """Returns whether samples are asked for by index, by this process, its threads or workers."""
        return self._arrays is None and self.stream is None

    @property
    def loading(self) -> Loading | None:
        """Returns the way in which this process loads its samples now; None: they are in memory."""
        if self.stream is not None:
            return self.stream.loading
        return None if self._arrays is not None else self.sources.loading

    def _microbatch(self, part: StepSlice, place: BatchRows, ids: np.ndarray, inputs: Any, targets: Any) -> Microbatch:
        if self._arrays is None and self._world.device.type != "cpu":
            if self.phase is not None:
                self.phase(TRANSFER)
            # On a GPU the phase is the time that kernels wait for the copy, not the time that both overlap.
            inputs, targets = copies_to(self._world.device)((inputs, targets))
            if self.phase is not None:
                self.phase(DATA)
        # Evaluations draw the same, so that losses can be compared.
        epoch = part.epoch if self._training else -1
        drawn_for = SampleIds(self.order.seed, epoch, part.padded(ids))
        if self._augments:
            inputs, targets = self._augmented(inputs, targets, drawn_for, self._world.device)
        if self._plan.channels_last:
            inputs = in_channels_last(inputs)
        if self._kind == torch.float64:
            inputs, targets = in_float64((inputs, targets))
        weights, kind = counts_of(self._task, targets) if self._counts else None, self._kind
        if weights is not None:  # zeros for a row of padding
            weights = tree_map(lambda each: each.to(kind) if len(ids) else torch.zeros_like(each, dtype=kind), weights)
        padding = 0 if len(ids) else 1
        if self._world.domain is not None:
            inputs, targets = cut_batch(self._task, inputs, targets)
        return Microbatch(inputs, targets, len(ids), weights, padding, drawn_for, place if self._places else None)

    def _augmented(self, inputs: Any, targets: Any, samples: SampleIds, device: torch.device) -> tuple[Any, Any]:
        keys = sent(torch.from_numpy(sample_keys(*samples)), device)
        with inside(samples):
            return augment(self._task, inputs, targets, keys, training=self._training)


@contextlib.contextmanager
def offsets_kept() -> Iterator[None]:
    """Context that restores the offsets of files open for reading, which a child that reads them moves."""
    folder, before = "/proc/self/fd", dict[int, int]()
    for name in os.listdir(folder) if os.path.isdir(folder) else ():  # noqa: PTH112, PTH208
        with contextlib.suppress(OSError):
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                before[int(name)] = os.lseek(int(name), 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for descriptor, offset in before.items():
            with contextlib.suppress(OSError):
                os.lseek(descriptor, offset, os.SEEK_SET)


def training_loader(
    task: Task, dataset: Dataset, plan: Plan, world: World, order: SampleOrder | None = None
) -> BatchLoader:
    """Loads shuffled batches of `task.batch_size` samples over the whole world, in `training_order`.

    Raises:
        PlanError: the plan has more parts than a batch has samples.
    """
    for key in ("microbatches", "exact"):
        if getattr(plan, key) > max(MOST_PARTS, task.batch_size):
            raise PlanError(f"{key}={getattr(plan, key)} cuts a batch of {task.batch_size} samples: take fewer parts")
    order = order or training_order(task, dataset)
    if order.sampling is not None and order.sampling.repeats:
        dataset = with_copies(dataset)
    return BatchLoader(task, dataset, order, plan, world, training=True)


def evaluation_loader(task: Task, dataset: Dataset, plan: Plan, world: World) -> BatchLoader:
    """Loads all samples once, in order, in batches of twice a training microbatch, since no gradients are kept.

    A loss of the whole batch, and a task with `consecutive_batches`, have the batches of the training, under any plan.

    Raises:
        PlanError: the plan's validation_batch, of such a task.
    """
    as_training = task.whole_batch_loss or task.consecutive_batches
    if as_training and plan.validation_batch is not None:
        why = "batches continue one another"
        if task.whole_batch_loss:
            why = "loss compares the samples of a batch"
        raise PlanError(
            f"validation_batch={plan.validation_batch}: {type(task).__name__}'s {why}, "
            "so an evaluation has the training's batches: leave it out"
        )
    batch_size = task.batch_size if as_training else evaluated_at_once(plan, task.batch_size)
    length = len(dataset)  # type: ignore[arg-type]
    order = SampleOrder(seed=task.seed, length=length, batch_size=batch_size, shuffle=False)
    return BatchLoader(task, dataset, order, plan, world, training=False)


def evaluated_at_once(plan: Plan, batch_size: int) -> int:
    """Returns the samples of an evaluation's batch, from those of a training's; without microbatches any plan's."""
    ways = plan.exact or plan.data_parallel
    return plan.validation_batch or max(2 * ways, -(-2 * batch_size // plan.microbatches))


def in_channels_last(inputs: Any) -> Any:
    """Returns inputs whose images, of shape (n, channels, height, width), are laid out channels last."""

    def laid_out(leaf: Any) -> Any:
        image = isinstance(leaf, Tensor) and leaf.dim() == 4
        if image and (leaf.is_floating_point() or leaf.dtype == torch.uint8):
            return leaf.contiguous(memory_format=torch.channels_last)
        return leaf

    return tree_map(laid_out, inputs)
