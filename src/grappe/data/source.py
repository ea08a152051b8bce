"""Sources of batches: this process, its threads, or worker processes that are kept between epochs and evaluations."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import re
import signal
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch.utils.data import DataLoader

from grappe.data.collate import collated, explained, is_half_free
from grappe.data.device_copy import is_dense, page_locked
from grappe.data.loading import FIRST, Kind, Loading, Spent, Tuner, kinds_of, record, recorded
from grappe.data.seeded import SeededDataset
from grappe.errors import DataError, GrappeError, PlanError, TaskError
from grappe.launch.fork import end_with_parent, parents_garbage_spared
from grappe.launch.world import World, own_cores
from grappe.plan import Plan
from grappe.private_api.multiprocessing import KilledForks, end_where_a_queue_fails
from grappe.private_api.torch import end_data_workers, tree_map
from grappe.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Dataset and form of the batches that a source makes."""

    dataset: SeededDataset
    task: Task
    pin: bool
    """Whether batches are in page-locked memory, from which they are copied to a GPU while it computes."""
    prefetch: int
    """Batches that each worker process, or all threads together, have ready."""
    batch: Callable[[Sequence[Any]], Any] | None = None
    """Makes a batch of samples; None: the task does."""

    def collate(self, samples: Sequence[Any]) -> Any:
        """Makes a batch of samples."""
        batch = (self.batch or functools.partial(collated, self.task))(samples)
        return tree_map(_pinned, batch) if self.pin else batch


def source_of(samples: Samples, loading: Loading) -> Source:
    """Makes the source of a way to load.

    Raises:
        TaskError: threads, of a dataset whose samples depend on global generators.
    """
    if loading.workers == 0:
        return ThisProcess(samples)
    if loading.kind == "processes":
        return WorkerProcesses(samples, loading.workers)
    sample = for_threads(samples.dataset)
    return ThreadedBatches(sample, samples.collate, workers=loading.workers, ahead=samples.prefetch)


def for_threads(dataset: SeededDataset) -> Callable[[Request], Any]:
    """Returns the function that loads a sample in any thread.

    Raises:
        TaskError: the dataset's samples depend on global generators, which threads share.
    """
    if dataset.keyed is None:
        name = type(dataset.dataset).__name__
        raise TaskError(
            f"loading=threads: {name} draws from generators that all threads share, as far as grappe can tell: use "
            f"loading=processes, or give {name} `keyed = True` and a method sample(index, key) that draws from the key "
            "alone"
        )
    return dataset.keyed


class ThisProcess:
    """Batches that are loaded when they are asked for. As of all sources: in the order of the requests."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._requests: Iterator[Sequence[Request]] = iter(())

    def begin(self, requests: Iterator[Sequence[Request]]) -> None:
        """Begins to load the batches of (epoch, id) requests; may begin again once all were taken."""
        self._requests = requests

    def next(self) -> Any:
        """Returns the next batch, (inputs, targets) on the CPU."""
        return self._samples.collate(self._samples.dataset.__getitems__(next(self._requests)))

    def close(self) -> None:
        """Ends its threads or processes."""


class WorkerProcesses:
    """Batches of a DataLoader's worker processes, which are forked once."""

    def __init__(self, samples: Samples, workers: int) -> None:
        self._requests = _Requests()
        self._loaded: Any = None
        # How many are too many is measured; workers that wait for a disk may be more than cores.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        self._loader: DataLoader[Any] = DataLoader(
            samples.dataset,
            batch_sampler=self._requests,
            collate_fn=samples.batch or functools.partial(collated, samples.task),
            num_workers=workers,
            worker_init_fn=begin_worker,
            # Our processes come from a server, and would have one started for their workers: it would neither
            # know a task file's classes nor have torch imported.
            multiprocessing_context=KilledForks(),
            persistent_workers=True,
            prefetch_factor=samples.prefetch,
            pin_memory=samples.pin,
            generator=torch.Generator(),  # it draws a seed for its workers, and must not from dropout's stream
        )

    def begin(self, requests: Iterator[Sequence[Request]]) -> None:
        self._requests.batches = requests
        settle()
        try:
            with parents_garbage_spared():
                self._loaded = iter(self._loader)
        except (OSError, RuntimeError) as error:
            raise explained(error) from error
        _UNFINISHED.add(self._loaded)

    def next(self) -> Any:
        try:
            return next(self._loaded)
        except Exception as first:
            error = first
            # Who keeps the error keeps its frames, and so the workers: a notebook would wait ten seconds for them.
            try:
                end_data_workers(self._loaded)
            except RuntimeError as ended:  # torch's signal handler: a worker closed its socket, and has ended now
                if isinstance(first, ConnectionError | EOFError):
                    error = ended
            if not isinstance(error, GrappeError):
                raise _explained(error) from error.__cause__
            kind = type(error)  # the task's own message, without the worker's traceback
            raise kind(str(error).rstrip().rpartition(f"{kind.__name__}: ")[2]) from error

    def close(self) -> None:
        end_data_workers(self._loaded)


class _Requests:
    """A batch sampler that reads an iterator of requests once."""

    def __init__(self) -> None:
        self.batches: Iterator[Sequence[Request]] = iter(())

    def __iter__(self) -> Iterator[list[Request]]:
        return (list(batch) for batch in self.batches)


def _pinned(leaf: Any) -> Any:
    if is_dense(leaf):
        return page_locked(leaf) if leaf.is_cpu else leaf
    return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf


MOST_PER_CORE = 2  # workers: those that wait for a disk need no core


class Sources:
    """Threads and worker processes of a loader, which outlive a pass over the data.

    A pass that is not taken to its end has its source closed; two passes at once have a source each.
    """

    def __init__(self, samples: Samples, plan: Plan, world: World) -> None:
        self.samples = samples
        self._plan, self._cores = plan, own_cores(world.process)
        self._device = world.device.type
        self._kinds = kinds_of(plan, keyed=samples.dataset.keyed is not None)
        self._idle: Source | None = None
        self._busy: list[Source] = []
        self._tuner: Tuner | None = None
        self._note: Callable[[Loading], None] = lambda loading: None
        self.like: Sources | None = None
        """Sources of another loader, as which this one loads from the next pass on if the dataset allows it."""
        # Training on a CPU needs the cores itself; with a GPU the cores only load data.
        few = min(FIRST, self._cores - 1 if self._device == "cuda" else self._cores // 4)
        kind: Kind = "threads" if plan.loading == "threads" else "processes"
        self.loading = Loading(kind=kind, workers=few if plan.workers is None else plan.workers)
        self.tuned = False
        """Whether the number of workers was found by measuring, by this start or an earlier one."""

    def begin(self, requests: Iterator[Sequence[Request]]) -> Source:
        """Begins to load batches."""
        if self.like is not None:
            self._load_as(self.like.loading)
        source, self._idle = self._idle or source_of(self.samples, self.loading), None
        self._busy.append(source)
        source.begin(requests)
        return source

    def end(self, source: Source, *, exhausted: bool) -> None:
        """Keeps a source for the next pass if all of its batches were taken, else closes it."""
        if source not in self._busy:  # all were closed meanwhile
            return
        self._busy.remove(source)
        if exhausted and self._idle is None:
            self._idle = source
        else:
            source.close()

    def changes(self) -> bool:
        """Counts a step; returns whether the next steps are to be loaded in another way, by a new source."""
        loading = None if self._tuner is None else self._tuner.step()
        if loading is None:
            return False
        if self._tuner is not None:  # else the quickest way is known
            self._note(self.loading)  # what works is known if the next way ends the training
        return self._load_as(loading)

    def close(self) -> None:
        """Ends all threads and worker processes."""
        kept = [] if self._idle is None else [self._idle]
        for source in (*self._busy, *kept):
            source.close()
        self._busy.clear()
        self._idle = None

    def tune(self, spent: Spent, earlier_record: object, chosen: Callable[[Mapping[str, Any]], None]) -> None:
        """Finds the quickest way to load during the first steps, where the plan leaves it open.

        Args:
            spent: what steps have cost.
            earlier_record: the result of an earlier start of the run.
            chosen: told what is to be kept with the run.
        """
        asked = self._plan.workers
        if asked == 0 or (asked is not None and len(self._kinds) == 1):
            return
        earlier = recorded(earlier_record, self._kinds, self._cores, self._device)
        if earlier is not None and asked in (None, earlier.workers):
            self._load_as(earlier)
            self.tuned = asked is None
            return

        def tuned(loading: Loading) -> None:
            self._tuner, self.tuned = None, asked is None
            self._note(loading)

        self._note = lambda loading: chosen(record(loading, self._cores, self._device))
        self._tuner = Tuner(
            first=self.loading,
            kinds=self._kinds,
            most=asked or MOST_PER_CORE * self._cores,
            spent=spent,
            device=self._device,
            chosen=tuned,
            allowed=lambda loading: loading.kind == "threads" or is_half_free(),
        )

    def _load_as(self, loading: Loading) -> bool:
        if loading.kind not in self._kinds:
            loading = Loading(kind=self._kinds[0], workers=loading.workers)
        if loading == self.loading:
            return False
        self.loading = loading
        if self._idle is not None:
            self._idle.close()
            self._idle = None
        return True


Request = tuple[int, int]
"""Epoch and id of a sample."""
_PARTS = 4  # of a batch for each thread: samples differ in size

_ACTIVE: weakref.WeakSet[ThreadedBatches] = weakref.WeakSet()


class ThreadedBatches:
    """Batches loaded by `workers` threads, `ahead` of them before they are asked for.

    Decoders and tensor operations give the interpreter free, and a batch is neither copied nor sent.

    Args:
        sample: loads one sample; called by several threads at once.
        collate: makes a batch of samples; called by one of the threads, one batch at a time.
    """

    def __init__(
        self, sample: Callable[[Request], Any], collate: Callable[[Sequence[Any]], Any], *, workers: int, ahead: int
    ) -> None:
        self._sample, self._collate = sample, collate
        self._workers, self._most = workers, ahead + 1
        self._collating = threading.Lock()  # a task's own collate may not be made for several threads
        self._requests: Iterator[Sequence[Request]] = iter(())
        self._batches: deque[Future[Any]] = deque()
        self._pool = _pool(workers)
        _ACTIVE.add(self)

    def begin(self, requests: Iterator[Sequence[Request]]) -> None:
        """Begins to load these batches."""
        self._requests = requests
        self._read_ahead()

    def next(self) -> Any:
        """Returns the next batch; raises what a thread raised."""
        self._read_ahead()
        return self._batches.popleft().result()

    def close(self) -> None:
        """Ends the threads; batches that were read ahead are dropped."""
        for batch in self._batches:
            batch.cancel()  # its threads stop after the sample at hand
        self._batches.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def settle(self) -> None:
        """Waits until no thread is at work; it goes on when the next batch is asked for."""
        wait(list(self._batches))

    def _read_ahead(self) -> None:
        while len(self._batches) < self._most:
            requests = next(self._requests, None)
            if requests is None:
                return
            self._batches.append(self._begun(requests))

    def _begun(self, requests: Sequence[Request]) -> Future[Any]:
        """Has threads load the parts of a batch; the one that loads the last part makes the batch."""
        share = -(-len(requests) // (_PARTS * self._workers))
        samples: list[Any] = [None] * len(requests)
        parts_left, lock = -(-len(requests) // share), threading.Lock()
        batch: Future[Any] = Future()

        def load(first: int) -> None:
            nonlocal samples, parts_left
            try:
                for place in range(first, min(first + share, len(requests))):
                    if batch.done():  # failed, or dropped
                        return
                    samples[place] = self._sample(requests[place])
                with lock:
                    parts_left -= 1
                    last = parts_left == 0
                if last:
                    with self._collating:
                        result = self._collate(samples)
                    samples = []  # they are in the batch
                    with contextlib.suppress(InvalidStateError):
                        batch.set_result(result)
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):
                    batch.set_exception(error)

        for first in range(0, len(requests), share):
            self._pool.submit(load, first)
        return batch


Source = ThisProcess | WorkerProcesses | ThreadedBatches
"""Loaders of batches."""


def settle() -> None:
    """Waits until no thread of this module is at work: a process that is forked now inherits no lock that is held."""
    for pool in list(_ACTIVE):
        pool.settle()


def _pool(workers: int) -> ThreadPoolExecutor:
    """Starts threads whose tensor operations use no further threads, as in a data worker."""
    process_threads, started = torch.get_num_threads(), threading.Barrier(workers + 1)
    pool = ThreadPoolExecutor(workers, "grappe-data", initializer=_begin_thread)
    try:
        for _ in range(workers):
            pool.submit(started.wait)
        started.wait()
    except BaseException as error:
        started.abort()  # else those that were started would wait for the others for ever
        pool.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, RuntimeError) and not isinstance(error, threading.BrokenBarrierError):
            raise PlanError(f"{workers} threads cannot be started ({error}): use fewer workers=") from error
        raise
    # OpenMP's number of threads is each thread's own; MKL's and the one for new threads are the process's.
    torch.set_num_threads(process_threads)
    return pool


def _begin_thread() -> None:
    torch.get_num_threads()  # a thread takes the process's number when it first asks, also after it was given another
    torch.set_num_threads(1)


_KILLED = re.compile(r"DataLoader worker \(pid[^)]*\) is killed by signal: (?P<signal>[^.]*)")
_UNFINISHED: weakref.WeakSet[Iterator[Any]] = weakref.WeakSet()
"""Iterators of DataLoaders, whose workers end with this process even if an error of the user's keeps a reference."""


def begin_worker(_: int) -> None:
    """Prepares a new worker: it ends with its parent alone, not by a signal to all processes of a job."""
    end_with_parent()
    end_where_a_queue_fails()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@atexit.register  # before multiprocessing's handler, which would wait for workers that ignore SIGTERM
def _end_unfinished() -> None:
    for loaded in list(_UNFINISHED):
        end_data_workers(loaded)


@contextlib.contextmanager
def explaining_ended_workers() -> Iterator[None]:
    """Context in which the end of a worker is one message, wherever torch's signal handler raises it."""
    try:
        yield
    except RuntimeError as error:
        if (clear := _explained(error)) is error:
            raise
        raise clear from error


def _explained(error: BaseException) -> BaseException:
    """Returns an error with a remedy, if `error` reports a worker's end; else `error`."""
    cause = error.__cause__ or error  # torch's own says no more than that a worker has ended
    if (full := explained(cause)) is not cause:
        return full
    killed = _KILLED.search(str(cause)) or _KILLED.search(str(error))
    if killed is None and "exited unexpectedly" not in str(error) and not isinstance(error, ConnectionError | EOFError):
        return explained(error)
    name = killed["signal"] if killed is not None else "no signal"
    number = next((number for number in signal.Signals if signal.strsignal(number) == name), None)
    why = " (mostly by the kernel, when memory is short)" if number == signal.SIGKILL else ""
    return DataError(
        f"a data worker was ended by {name if number is None else number.name}{why}. Checkpoints are kept: start the "
        "run again with fewer of them (such as --plan workers=1), with loading=threads, or with more memory"
    )
