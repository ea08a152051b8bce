"""Sources of batches: this process, its threads, or worker processes that are kept between epochs and evaluations."""

from __future__ import annotations

import dataclasses
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from grappe.data.collate import collated
from grappe.data.device_copy import is_dense, page_locked
from grappe.data.loading import Loading
from grappe.data.seeded import SeededDataset
from grappe.data.shared_memory import explained
from grappe.data.threads import Request, ThreadedBatches, settle
from grappe.data.workers import begin_worker, next_batch, register
from grappe.errors import TaskError
from grappe.private_api.torch import end_data_workers, tree_map
from grappe.task import Task


class Source(Protocol):
    """Loads batches in the order in which they are requested; may begin again once all were taken."""

    def begin(self, requests: Iterator[Sequence[Request]]) -> None:
        """Begins to load the batches of (epoch, id) requests."""

    def next(self) -> Any:
        """Returns the next batch, (inputs, targets) on the CPU."""

    def close(self) -> None:
        """Ends its threads or processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Dataset and form of the batches that a source makes."""

    dataset: SeededDataset
    task: Task
    pin: bool
    """Whether batches are in page-locked memory, from which they are copied to a GPU beside its work."""
    prefetch: int
    """Batches that each worker process, or all threads together, have ready."""

    def collate(self, samples: Sequence[Any]) -> Any:
        """Makes a batch of samples."""
        batch = collated(self.task, samples)
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
            f"loading=threads: {name} draws from generators that all threads share, as far as can be known: use "
            f"loading=processes, or give {name} `keyed = True` and a method sample(index, key) that draws from the key "
            "alone"
        )
    return dataset.keyed


class ThisProcess:
    """Batches that are loaded when they are asked for."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._requests: Iterator[Sequence[Request]] = iter(())

    def begin(self, requests: Iterator[Sequence[Request]]) -> None:
        self._requests = requests

    def next(self) -> Any:
        return self._samples.collate(self._samples.dataset.__getitems__(next(self._requests)))

    def close(self) -> None:
        return


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
            collate_fn=functools.partial(collated, samples.task),
            num_workers=workers,
            worker_init_fn=begin_worker,
            # Our processes come from a server, and would have one started for their workers: it would neither
            # know a task file's classes nor have torch imported.
            multiprocessing_context="fork",
            persistent_workers=True,
            prefetch_factor=samples.prefetch,
            pin_memory=samples.pin,
            generator=torch.Generator(),  # it draws a seed for its workers, and must not from dropout's stream
        )

    def begin(self, requests: Iterator[Sequence[Request]]) -> None:
        self._requests.batches = requests
        settle()
        # A forked worker must not collect its parent's garbage: a process group of an earlier training, say,
        # whose end waits for threads that are not there.
        gc.freeze()
        try:
            self._loaded = iter(self._loader)
        except (OSError, RuntimeError) as error:
            raise explained(error) from error
        finally:
            gc.unfreeze()
        register(self._loaded)

    def next(self) -> Any:
        return next_batch(self._loaded)

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
