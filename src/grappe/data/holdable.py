"""Holds worker processes that load samples, and reads what they have computed, through memory that they share."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from grappe.data.seeded import SeededDataset
from grappe.data.threads import LONGEST_HOLD, Request

_LOOK_AGAIN = 0.001  # seconds: a held worker takes a thousandth of a core


class HoldableDataset(Dataset[Any]):
    """A dataset whose loading, in worker processes forked from this one, can be held between two samples.

    There is no lock, which a killed worker could leave taken, and a hold ends by itself: whatever happens to this
    process, no worker waits for ever.
    """

    def __init__(self, dataset: SeededDataset, workers: int) -> None:
        self._dataset, self._workers = dataset, workers
        # When the hold ends; for each worker its CPU seconds, then its number of batches.
        self._shared = memoryview(mmap.mmap(-1, 8 * (1 + 2 * workers))).cast("d")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Request) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, requests: Sequence[Request]) -> list[Any]:
        """Loads the samples of a batch; called by a worker."""
        worker = get_worker_info()
        assert worker is not None
        samples = self._dataset.__getitems__(self._unheld(requests, worker.id))
        self._shared[1 + self._workers + worker.id] += 1
        return samples

    def hold(self) -> None:
        """Has workers begin no sample until `release`, or for LONGEST_HOLD seconds."""
        self._shared[0] = time.monotonic() + LONGEST_HOLD

    def release(self) -> None:
        """Has workers go on."""
        self._shared[0] = 0.0

    def cpu_seconds(self) -> float:
        """Returns what the workers have computed, up to the last sample of each."""
        return sum(self._shared[1 : 1 + self._workers])

    def batches(self) -> int:
        """Returns the number of batches that the workers have loaded."""
        return int(sum(self._shared[1 + self._workers :]))

    def _unheld(self, requests: Sequence[Request], worker: int) -> Iterator[Request]:
        for request in requests:
            latest = time.monotonic() + LONGEST_HOLD
            while time.monotonic() < min(self._shared[0], latest):
                time.sleep(_LOOK_AGAIN)
            yield request
            self._shared[1 + worker] = time.process_time()
