"""Meeting: processes of one machine wait for each other, in microseconds and without a network."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

from grappe.launch.rank import ProcessRank

NUMBER = struct.Struct("q")
PATIENCE_SECONDS = 60.0
PAUSE_SECONDS = 2e-5


class Meeting:
    """Waits for all of a plan's processes, through a file in memory that they share.

    Args:
        folder: theirs; the file is made in it.
    """

    def __init__(self, process: ProcessRank, folder: Path) -> None:
        self._process, self._times = process, 0
        file = os.open(folder / "meeting", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            size = NUMBER.size * (process.size + 1)
            os.ftruncate(file, size)  # zeros; what is there stays
            self._numbers = mmap.mmap(file, size)
        finally:
            os.close(file)

    def wait(self) -> None:
        """Waits until all processes have called it as often as this one; at most PATIENCE_SECONDS, if one has died."""
        self._times += 1
        self._write(self._process.rank, self._times)
        limit = time.monotonic() + PATIENCE_SECONDS
        others = [rank for rank in range(self._process.size) if rank != self._process.rank]
        while any(self._read(rank) < self._times for rank in others) and time.monotonic() < limit:
            time.sleep(PAUSE_SECONDS)

    def agreed(self, number: int) -> int:
        """Returns process 0's number. Collective."""
        if self._process.rank == 0:
            self._write(self._process.size, number)
        self.wait()
        return self._read(self._process.size)

    def _read(self, place: int) -> int:
        return int(NUMBER.unpack_from(self._numbers, place * NUMBER.size)[0])

    def _write(self, place: int, number: int) -> None:
        NUMBER.pack_into(self._numbers, place * NUMBER.size, number)
