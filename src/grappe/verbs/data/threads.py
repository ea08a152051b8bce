"""Runs work on many images by threads, in order, without holding more than a few results at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from grappe.launch.world import cores

T = TypeVar("T")
R = TypeVar("R")
_AHEAD = 8  # of each thread: images differ in size


def in_threads(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields the results of `work` for each item, in order; a thread for each core works ahead of the reader.

    Decoders give the interpreter free while they work, so threads are as quick as processes.
    """
    threads = cores()
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
