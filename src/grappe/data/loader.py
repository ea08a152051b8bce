"""Turns a dataset and a sample order into this process's batches, on its device."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from grappe.data.arrays import in_memory, with_copies
from grappe.data.batch import Batch, Microbatch
from grappe.data.collate import augment, augments, collated, counts_of, on_device
from grappe.data.draw import sample_keys
from grappe.data.kinds import refuse_other_kinds
from grappe.data.order import SampleOrder, cut
from grappe.data.pieces import ExactPieces
from grappe.data.rand_like import SampleIds, inside
from grappe.data.rows import at_rows
from grappe.data.sampling import DrawnSamples, Sampling
from grappe.data.seeded import SeededDataset
from grappe.data.shared_memory import explained
from grappe.data.workers import begin_worker, next_batch, register
from grappe.errors import TaskError
from grappe.errors.user_code import at, line_of, user_call
from grappe.launch.world import World, own_cores
from grappe.plan import Plan
from grappe.private_api.torch import tree_map
from grappe.profiling.phases import DATA, TRANSFER
from grappe.task import Task, overrides

Fetch = Callable[[np.ndarray], tuple[Any, Any]]
"""Sample ids to a batch (inputs, targets)."""


class Slice(NamedTuple):
    """The samples of one step that belong to this process, cut into microbatches."""

    step: int
    epoch: int
    samples: int
    ids: np.ndarray
    pieces: tuple[np.ndarray, ...]
    """Sample ids by microbatch; an empty piece gets one padding row, whose weight is 0."""


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
        self._augments = augments(task, training=training)
        self._counts = overrides(task, "counts")
        self._parts = plan.microbatches if training else 1
        self._exact = ExactPieces.of(plan)
        self.phase: Callable[[int], None] | None = None  # told when a batch goes to the device, and is there
        self._arrays = in_memory(dataset)
        self._cuts = plan.pipeline > 1 and self._parts > 1 and self._arrays is None
        if self._arrays is not None:
            self._arrays.to_device(world.device)

    def slices(self, start: int, stop: int) -> Iterator[Slice]:
        """Yields this process's part of steps `start` to `stop`, a pure function of the sample order."""
        per_epoch = self.order.steps_per_epoch
        for step in range(start, stop):
            epoch, within = divmod(step, per_epoch)
            everyone = self.order.ids(epoch, within)
            first, last = cut(len(everyone), self._world.data_size, self._world.data_rank)
            ids = everyone[first:last]
            if self._exact is not None:
                pieces = self._exact.cut(everyone, self._world.data_rank)
                ids = np.concatenate(pieces)
            elif self._parts == 1:
                pieces = (ids,)
            else:
                bounds = [cut(len(ids), self._parts, part) for part in range(self._parts)]
                pieces = tuple(ids[a:b] for a, b in bounds)
            yield Slice(step, epoch, len(everyone), ids, pieces)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Gives the batches of steps `start` to `stop`. Collective where the task counts its targets."""
        return self._made(start, stop, self._fetch(start, stop, self._workers()))

    def rehearsed(self) -> Iterator[Batch]:
        """The first batch, loaded by this process: no workers are started for one. Collective likewise."""
        return self._made(0, 1, self._fetch(0, 1, 0))

    def _made(self, start: int, stop: int, fetch: Fetch) -> Iterator[Batch]:
        with inside(None):  # whatever is in the model when the batches end
            for part in self.slices(start, stop):
                micros = tuple([self._microbatch(part, *piece) for piece in self._loaded(part, fetch)])
                yield Batch(part.epoch, part.step, micros, part.samples, self._count(part, micros), part.ids)

    def example(self) -> Any:
        """Returns the inputs of the first sample or two, as a batch on the CPU."""
        return self.example_batch()[0]

    def example_batch(self) -> tuple[Any, Any]:
        """Returns the first sample or two, as a batch (inputs, targets) on the CPU."""
        ids = np.arange(min(2, len(self.dataset)))  # type: ignore[arg-type]
        if self._arrays is not None:
            inputs, targets = self._arrays.gather(ids, self._world.device)
        else:
            seeded = SeededDataset(self.dataset, seed=self.order.seed)
            inputs, targets = collated(self._task, [seeded[-1, int(index)] for index in ids])
        cpu = torch.device("cpu")
        inputs, targets = tree_map(lambda leaf: on_device(leaf, cpu), (inputs, targets))
        # A model may take what augment makes of the samples, and nothing else.
        return self._augmented(inputs, targets, -1, ids, cpu)

    def _loaded(self, part: Slice, fetch: Fetch) -> Iterator[tuple[np.ndarray, Any, Any]]:
        """Each piece's sample ids, inputs and targets."""
        if not self._cuts:
            for ids in part.pieces:
                yield ids, *fetch(ids)
            return
        # The task's own collate pads all of a step's microbatches to one length, as a pipeline needs them.
        count, first, batch = max(1, len(part.ids)), 0, fetch(part.ids)
        for ids in part.pieces:
            places = range(first, first + len(ids)) if len(ids) else (0,)
            yield ids, *at_rows(batch, places, count)
            first += len(ids)

    def _fetch(self, start: int, stop: int, workers: int) -> Fetch:
        """Returns a function that loads a piece; call it for the pieces of steps `start` to `stop`, in order."""
        arrays, device = self._arrays, self._world.device
        if arrays is not None:
            return lambda ids: arrays.gather(padded(ids), device)
        # Workers read ahead, so they have the order for themselves.
        loader = self._loader(
            ((part, padded(ids)) for part in self.slices(start, stop) for ids in self._requested(part)),
            workers,
        )
        # A forked worker must not collect its parent's garbage: a process group of an earlier training, say,
        # whose end waits for threads that are not there.
        gc.freeze()
        try:
            loaded = iter(loader)
        except OSError as error:
            raise explained(error) from error
        finally:
            gc.unfreeze()
        register(loaded)
        return lambda ids: next_batch(loaded)

    def _requested(self, part: Slice) -> tuple[np.ndarray, ...]:
        return (part.ids,) if self._cuts else part.pieces

    def _loader(self, requests: Iterator[tuple[Slice, np.ndarray]], workers: int) -> DataLoader:
        # Validation draws the same in every evaluation, so that losses can be compared.
        sampler = _Requests(
            ((part.epoch if self._training else -1, int(index)) for index in ids) for part, ids in requests
        )
        return DataLoader(
            SeededDataset(self.dataset, seed=self.order.seed),
            batch_sampler=sampler,
            collate_fn=functools.partial(collated, self._task),
            num_workers=workers,
            worker_init_fn=begin_worker if workers else None,
            # Our processes come from a server, and would have one started for their workers: it would neither
            # know a task file's classes nor have torch imported.
            multiprocessing_context="fork" if workers else None,
            pin_memory=self._world.device.type == "cuda",
            generator=torch.Generator(),  # it draws a seed for its workers, and must not from dropout's stream
        )

    @property
    def loading(self) -> int | None:
        """The number of this process's data workers; None: the samples are in memory."""
        return None if self._arrays is not None else self._workers()

    def _workers(self) -> int:
        if self._plan.workers is not None:
            return self._plan.workers
        mine = own_cores(self._world.process)
        # Training on a CPU needs the cores itself; beside a GPU the cores only load data.
        return min(8, max(0, mine - 1)) if self._world.device.type == "cuda" else min(8, mine // 4)

    def _microbatch(self, part: Slice, ids: np.ndarray, inputs: Any, targets: Any) -> Microbatch:
        if self._arrays is None:
            inputs, targets = self._to_device((inputs, targets))
        # Evaluations draw the same, so that losses can be compared.
        epoch = part.epoch if self._training else -1
        if self._augments:
            inputs, targets = self._augmented(inputs, targets, epoch, padded(ids), self._world.device)
        if self._plan.channels_last:
            inputs = tree_map(_channels_last, inputs)
        weights = None
        if self._counts:
            weights = counts_of(self._task, targets)
            if weights is not None:
                weights = weights.float() if len(ids) else torch.zeros_like(weights, dtype=torch.float32)
        drawn_for = SampleIds(self.order.seed, epoch, padded(ids))
        return Microbatch(inputs, targets, len(ids), weights, 0 if len(ids) else 1, drawn_for)

    def _augmented(
        self, inputs: Any, targets: Any, epoch: int, ids: np.ndarray, device: torch.device
    ) -> tuple[Any, Any]:
        if not self._augments:
            return inputs, targets
        keys = torch.from_numpy(sample_keys(self.order.seed, epoch, ids)).to(device)
        return augment(self._task, inputs, targets, keys, training=self._training)

    def _to_device(self, batch: Any) -> Any:
        device = self._world.device
        if device.type == "cpu":
            return batch
        if self.phase is not None:
            self.phase(TRANSFER)
        moved = tree_map(lambda leaf: on_device(leaf, device), batch)
        if self.phase is not None:
            self.phase(DATA)
        return moved

    def _count(self, part: Slice, micros: tuple[Microbatch, ...]) -> float | Tensor:
        if not self._counts or not self._training:
            return float(part.samples)
        weights = [micro.weights for micro in micros if micro.weights is not None]
        if not weights:
            return float(part.samples)
        mine = torch.stack([one.sum() for one in weights])
        group = self._world.data_group
        if group is None:
            return mine.sum()
        if self._exact is not None:  # the pieces' counts in their order, so that their sum has the same bits
            return self._exact.gathered(mine, group).sum()
        total = mine.sum()
        torch.distributed.all_reduce(total, group=group)
        return total


class _Requests:
    """A batch sampler that reads an iterator of requests once."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return (list(batch) for batch in self._batches)


def padded(ids: np.ndarray) -> np.ndarray:
    """Returns `ids`; without any, sample 0 as a padding row, since a model cannot take an empty batch."""
    return ids if len(ids) else np.zeros(1, dtype=np.int64)


def check(dataset: object, split: str, task: Task) -> int:
    """Returns the dataset's length.

    Raises:
        TaskError: the dataset is not map-style, or is empty.
    """
    name = type(task).__name__
    if isinstance(dataset, IterableDataset):
        raise TaskError(
            f"{name}.data({split!r}) is an IterableDataset: it cannot be shuffled, cut or resumed exactly, since "
            "samples are asked for by index. Give a map-style dataset (__len__ and __getitem__)"
        )
    refuse_other_kinds(f"{name}.data({split!r})", dataset, at(task, "data"))
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except Exception as error:
        line = line_of(error)
        place = f" ({line})" if line else at(type(dataset), "__len__")
        raise TaskError(
            f"{name}.data({split!r}) has no length: {error}{place}. __len__ must return how many samples there are"
        ) from error
    if length == 0:
        place = at(type(dataset), "__len__") or at(task, "data")
        raise TaskError(f"{name}.data({split!r}) is empty: check the folder and the split{place}")
    return length


def training_loader(
    task: Task, dataset: Dataset, plan: Plan, world: World, order: SampleOrder | None = None
) -> BatchLoader:
    """Loads shuffled batches of `task.batch_size` samples over the whole world, in `training_order`."""
    order = order or training_order(task, dataset)
    if order.sampling is not None and order.sampling.repeats:
        dataset = with_copies(dataset)
    return BatchLoader(task, dataset, order, plan, world, training=True)


def training_order(task: Task, dataset: Dataset) -> SampleOrder:
    """Returns the order of the training samples, as the task's seed and `sampling` say."""
    drawn = drawn_samples(task, dataset)
    length = len(dataset) if drawn is None else drawn.samples  # type: ignore[arg-type]
    return SampleOrder(seed=task.seed, length=length, batch_size=task.batch_size, sampling=drawn)


def drawn_samples(task: Task, dataset: Dataset) -> DrawnSamples | None:
    """Returns what an epoch has as the task's `sampling` says; None: each sample once.

    Raises:
        TaskError: sampling() fails, or does not fit the dataset.
    """
    if not overrides(task, "sampling"):
        return None
    sampling = user_call(task, "sampling", dataset)
    if sampling is None:
        return None
    if not isinstance(sampling, Sampling):
        raise TaskError(
            f"{type(task).__name__}.sampling() returned {type(sampling).__name__}: return a grappe.Sampling, or None"
            + at(task, "sampling")
        )
    return DrawnSamples(sampling, len(dataset))  # type: ignore[arg-type]


def evaluation_loader(task: Task, dataset: Dataset, plan: Plan, world: World) -> BatchLoader:
    """Loads all samples once, in order, in batches of twice a training microbatch, since no gradients are kept.

    A loss of the whole batch has the batches of the training, under any plan.
    """
    ways = plan.exact or plan.data_parallel
    micro = -(-task.batch_size // (ways * plan.microbatches))
    batch_size = task.batch_size if task.whole_batch_loss else max(2, 2 * micro) * ways
    order = SampleOrder(
        seed=task.seed,
        length=len(dataset),  # type: ignore[arg-type]
        batch_size=batch_size,
        shuffle=False,
    )
    return BatchLoader(task, dataset, order, plan, world, training=False)


def _channels_last(leaf: Any) -> Any:
    if (
        isinstance(leaf, Tensor)
        and leaf.dim() == 4
        and (leaf.is_floating_point() or leaf.dtype == torch.uint8)
    ):
        return leaf.contiguous(memory_format=torch.channels_last)
    return leaf
