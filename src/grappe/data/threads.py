"""Threads: load the samples of batches by threads of this process, some batches ahead of the training."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from typing import Any

import torch

from grappe.errors import PlanError

Request = tuple[int, int]
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
        self,
        sample: Callable[[Request], Any],
        collate: Callable[[Sequence[Any]], Any],
        *,
        workers: int,
        ahead: int,
    ) -> None:
        self._sample, self._collate = sample, collate
        self._workers, self._most = workers, ahead + 1
        self._collating = threading.Lock()
        self._requests: Iterator[Sequence[Request]] = iter(())
        self._batches: deque[_Batch] = deque()
        self._pool = _pool(workers)
        _ACTIVE.add(self)

    def begin(self, requests: Iterator[Sequence[Request]]) -> None:
        """Begins to load these batches."""
        self._requests = requests
        self._read_ahead()

    def next(self) -> Any:
        """Returns the next batch; raises what a thread raised."""
        self._read_ahead()
        batch = self._batches.popleft()
        return batch.loaded.result()

    def close(self) -> None:
        """Ends the threads; batches that were read ahead are dropped."""
        for batch in self._batches:
            batch.drop()
        self._batches.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def settle(self) -> None:
        """Waits until no thread is at work; it goes on when the next batch is asked for."""
        wait([batch.loaded for batch in self._batches])

    def _read_ahead(self) -> None:
        while len(self._batches) < self._most:
            requests = next(self._requests, None)
            if requests is None:
                return
            batch = _Batch(self._sample, self._collated, requests)
            self._batches.append(batch)
            share = -(-len(requests) // (_PARTS * self._workers))
            batch.parts = -(-len(requests) // share)
            for first in range(0, len(requests), share):
                self._pool.submit(batch.load, first, first + share)

    def _collated(self, samples: Sequence[Any]) -> Any:
        with self._collating:  # a task's own collate may not be made for several threads
            return self._collate(samples)


class _Batch:
    """A batch that several threads load."""

    def __init__(
        self,
        sample: Callable[[Request], Any],
        collate: Callable[[Sequence[Any]], Any],
        requests: Sequence[Request],
    ) -> None:
        self._sample, self._collate, self._requests = sample, collate, requests
        self._samples: list[Any] = [None] * len(requests)
        self._lock = threading.Lock()
        self.parts = 0
        """Parts that are not loaded yet."""
        self.loaded: Future[Any] = Future()

    def load(self, first: int, stop: int) -> None:
        """Loads a part; who loads the last one makes the batch."""
        try:
            for place in range(first, min(stop, len(self._requests))):
                if self.loaded.done():  # failed, or dropped
                    return
                self._samples[place] = self._sample(self._requests[place])
            with self._lock:
                self.parts -= 1
                last = self.parts == 0
            if last:
                batch = self._collate(self._samples)
                self._samples = []  # they are in the batch
                with contextlib.suppress(InvalidStateError):
                    self.loaded.set_result(batch)
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                self.loaded.set_exception(error)

    def drop(self) -> None:
        """Has its threads stop after the sample at hand."""
        self.loaded.cancel()


def settle() -> None:
    """Waits until no thread of this module is at work: a process that is forked now inherits no lock that is held."""
    for pool in list(_ACTIVE):
        pool.settle()


def _pool(workers: int) -> ThreadPoolExecutor:
    """Starts threads whose tensor operations run on themselves alone, as those of a data worker do."""
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
