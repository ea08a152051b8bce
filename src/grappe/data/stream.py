"""Defines Stream, data that can only be read in order: process 0 reads it, and each global batch is cut from it."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from torch.utils.data import IterableDataset

from grappe.data.draw import mix
from grappe.data.loading import Loading
from grappe.data.seeded import digest, generators_kept, missing, seed_generators, seeded
from grappe.data.source import Samples, Source, source_of
from grappe.errors import DataError, RunError, TaskError
from grappe.errors.user_code import calls_users
from grappe.launch.world import World, packed, unpacked
from grappe.plan import Plan
from grappe.task import Task

POSITION = "stream"  # of the values of a checkpoint
_END = object()
_KEPT = 8  # positions: engines take batches ahead of the step that is saved


class Stream(IterableDataset[Any]):
    """Training samples that can only be read in order: a generator, an IterableDataset, `datasets` in streaming mode.

    Process 0 reads, ahead in a worker process unless the plan has workers=0, and each global batch is cut from what it
    read. So any number of processes sees the same samples. A stream that ends is begun again, after `set_epoch` if it
    has it.

    Args:
        source: gives the samples, pairs (input, target), and new ones each time that it is iterated. If it, or its
            iterator, has `state_dict` and `load_state_dict`, a resumed training continues from its state; else what
            was seen is read again, and skipped.
        view: makes a sample of what the source gives; default: that itself.
        samples: of an epoch. Default: the source's length; if it has none, a training needs steps.
        repeatable: whether it gives the same samples in each start. If not, nothing is skipped when resuming.
    """

    def __init__(
        self,
        source: Iterable[Any],
        view: Callable[[Any], Any] | None = None,
        *,
        samples: int | None = None,
        repeatable: bool = True,
    ) -> None:
        self.source, self.view, self.repeatable = source, view, repeatable
        self.samples = samples
        if samples is None:
            with contextlib.suppress(TypeError, NotImplementedError):
                self.samples = len(source)  # type: ignore[arg-type]
        self.endless = self.samples is None
        """Whether its length is unknown, so that the steps of a training decide."""

    def __len__(self) -> int:
        if self.samples is None:
            raise TaskError(
                "the training data is a stream of unknown length: say how long to train, --steps N (steps=N from "
                "Python); or give an epoch's samples, grappe.data.Stream(stream, samples=N)"
            )
        return self.samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source) if self.view is None else map(self.view, self.source)


def head(dataset: Any, count: int) -> Any:
    """Returns the first samples of a stream as a list; any other dataset as it is."""
    if not isinstance(dataset, Stream):
        return dataset
    with seeded(0):
        return list(itertools.islice(dataset, count))


def repeatable_head(make: Callable[[], Any], count: int) -> Any:
    """Returns the first samples of the stream that `make` makes, as a list; any other dataset as it is.

    Raises:
        TaskError: made again, the stream gives others.
    """
    dataset = make()
    samples = head(dataset, count)
    if isinstance(dataset, Stream) and not (dataset.repeatable and digest(samples) == digest(head(make(), count))):
        raise TaskError(
            "the order of the training stream is not repeatable: two trainings see other samples, so their weights "
            "cannot be compared. Give the stream a seed, or write its first samples out as a list"
        )
    return samples


class Position(msgspec.Struct, frozen=True):
    """The place of a batch in a stream, in the checkpoint after its step."""

    turn: int
    """Times that the stream was begun again before the batch."""
    taken: int
    """Samples of this turn before the batch."""
    state: Any
    """The stream's own state before the batch, if JSON can have it; else None."""
    size: int
    digest: str
    """Hash of the batch's samples."""


class _Read(NamedTuple):
    """A global batch."""

    samples: list[Any]
    position: Position
    note: str
    """The way in which the stream was resumed; for the user."""


class _Reader:
    """Reads a stream, in process 0 or its worker: batch requests [size] are answered in order."""

    keyed = None  # threads cannot read it

    def __init__(self, stream: Stream, seed: int, position: Position | None) -> None:
        self._stream, self._seed, self._resumed = stream, seed, position
        self._iterator: Iterator[Any] | None = None
        self._turn = self._taken = 0

    @calls_users("a sample of data()")
    def __getitems__(self, sizes: Sequence[int]) -> list[_Read]:
        note = ""
        with generators_kept():
            if self._iterator is None:
                note = self._resume()
            (size,) = sizes
            turn, taken, state = self._turn, self._taken, self._state()
            samples = [self._next() for _ in range(size)]
        return [_Read(samples, Position(turn, taken, state, size, digest(samples)), note)]

    def _begin(self, turn: int) -> None:
        source: Any = self._stream.source
        if callable(getattr(source, "set_epoch", None)):
            source.set_epoch(turn)
        self._turn, self._taken = turn, 0
        seed_generators(mix(self._seed, turn))
        self._iterator = iter(source)

    def _next(self) -> Any:
        """Returns the next sample, with the global generators seeded for it, so that its draws depend on its place."""
        while True:
            assert self._iterator is not None
            seed_generators(mix(self._seed, self._turn, self._taken + 1))
            if (sample := next(self._iterator, _END)) is not _END:
                break
            if not self._taken:
                raise DataError(
                    "the training stream has ended, and gives nothing when it is iterated again: take fewer steps, or "
                    "give what can be iterated again, a class with __iter__"
                )
            self._begin(self._turn + 1)
        self._taken += 1
        sample = sample if self._stream.view is None else self._stream.view(sample)
        if sample is None:
            raise missing(self._stream, self._taken - 1)
        return sample

    def _holder(self) -> Any:
        """Returns what has the stream's state: itself or its iterator."""
        places = (self._stream.source, self._iterator)
        return next((each for each in places if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")), None)

    def _state(self) -> Any:
        if not self._taken or (holder := self._holder()) is None:
            return None
        state = holder.state_dict()
        try:  # a list for a tuple, or a number's text for it, may mean something else
            return copied if (copied := json.loads(json.dumps(state))) == state else None
        except (TypeError, ValueError):
            return None

    def _resume(self) -> str:
        """Goes to the place after the batch at `position`; returns how, for the user."""
        resumed, repeatable = self._resumed, self._stream.repeatable
        self._begin(0 if resumed is None else resumed.turn)
        if resumed is None:
            return ""
        other = (
            "the stream gives other samples than before: its order is not repeatable, so samples may come twice, or not"
        )
        holder = self._holder()
        if resumed.state is not None and holder is not None:
            fresh = holder.state_dict()
            holder.load_state_dict(resumed.state)
            if holder is self._stream.source:
                self._iterator = iter(holder)
            self._taken = resumed.taken
            if self._is_next(resumed) or not repeatable:
                return "the stream is resumed by its own state"
            self._holder().load_state_dict(fresh)  # as a shuffle buffer, which `datasets` does not keep
            self._begin(resumed.turn)
        if not repeatable:
            return "the order of the stream is not repeatable: it is resumed with what it gives now"
        began = time.monotonic()
        for _ in range(resumed.taken):
            self._next()
        if not self._is_next(resumed):
            return other
        skipped = resumed.taken + resumed.size
        seconds = time.monotonic() - began
        return f"the stream is resumed by skipping: {skipped:,} samples are read again, in {seconds:.1f} s"

    def _is_next(self, position: Position) -> bool:
        """Reads the batch at `position`; returns whether it has the samples that it had."""
        return digest([self._next() for _ in range(position.size)]) == position.digest


class StreamBatches:
    """The batches of a stream: process 0 reads them, each process gets its rows. `begin` and `rows` are collective."""

    def __init__(self, stream: Stream, task: Task, plan: Plan, world: World) -> None:
        self._stream, self._task, self._plan, self._world = stream, task, plan, world
        self.loading = Loading(kind="processes", workers=int(plan.workers != 0))
        self._source: Source | None = None
        self._first: _Read | None = None
        self._positions: dict[int, Position] = {}
        self.example: list[Any] = []
        """One or two samples, on every process."""
        self.notes: Sequence[str] = ()
        """For the user, on every process."""
        self.step = -1
        """The step of the next batch; -1: it is not open."""

    def begin(self, step: int, sizes: Iterator[int], saved: Mapping[str, Any] | None) -> None:
        """Begins to read at `step`.

        Args:
            sizes: of the global batches from there on.
            saved: the Position of the batch before, as JSON.

        Raises:
            RunError: it is none.
        """
        self.step = step
        if self._world.rank == 0:
            try:
                position = None if saved is None else msgspec.convert(saved, Position)
            except msgspec.ValidationError as error:
                raise RunError(f"the checkpoint of step {step} has no place in a stream ({error})") from None
            reader: Any = _Reader(self._stream, self._task.seed, position)
            # As bytes: else each tensor of a worker's samples would be an open file.
            pack = packed if self.loading.workers else lambda read: read
            self._source = source_of(self._samples(reader, batch=lambda read: pack(read[0])), self.loading)
            self._source.begin([size] for size in sizes)  # type: ignore[misc]
            self._first = self._next()
        first = self._first
        shared = self._world.share(None if first is None else (first.samples[:2], first.note))
        assert shared is not None
        self.example, note = shared
        unlike = "its order is not repeatable: another training sees other samples"
        self.notes = [
            f"the training data is a stream: process 0 reads it{'' if self._stream.repeatable else f'; {unlike}'}",
            *([note] if note else []),
        ]

    def _next(self) -> _Read:
        assert self._source is not None
        read = self._source.next()
        return read if isinstance(read, _Read) else unpacked(read)

    def rows(self, spans: Sequence[Sequence[tuple[int, int]]]) -> list[Any]:
        """Returns this process's samples of the next batch; one sample as padding where it has none.

        Args:
            spans: of each process, its rows.
        """
        values = None
        if self._source is not None:
            read, self._first = self._first or self._next(), None
            self._positions[self.step + 1] = read.position
            self._positions.pop(self.step + 1 - _KEPT, None)
            values = [[row for a, b in own for row in read.samples[a:b]] or read.samples[:1] for own in spans]
        self.step += 1
        return self._world.scatter(values)

    def _samples(self, reader: Any, batch: Callable[[Sequence[Any]], Any] | None = None) -> Samples:
        pin = self._world.device.type == "cuda" and batch is None
        return Samples(dataset=reader, task=self._task, pin=pin, prefetch=self._plan.prefetch, batch=batch)

    def collate(self, samples: Sequence[Any]) -> Any:
        """Makes a batch of samples."""
        return self._samples(None).collate(samples)

    def position(self, step: int) -> dict[str, Any] | None:
        """Returns on process 0 the Position, as JSON, of the batch of the step before `step`."""
        place = self._positions.get(step)
        return None if place is None else msgspec.to_builtins(place)

    def close(self) -> None:
        """Ends the worker process."""
        if self._source is not None:
            self._source.close()
