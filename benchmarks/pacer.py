"""Pacer: stops a training loop between blocks of steps until its turn comes, and times the blocks."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """The rank, world size and folder of a contender's process."""

    rank: int
    size: int
    folder: Path
    """A folder shared with the peers' processes, for files and for the rendezvous."""
    device: str = "cpu"
    """"cpu" or "cuda"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Time of one block of steps in one process."""

    wall: float
    """Seconds a step."""
    cpu: float
    """CPU seconds a step, of all threads of the process: what another program's load changes least."""


class Pacer:
    """Every loop calls `tick` once behind each step; that call is the same for all of them.

    Args:
        pipe: sends None when ready, then a Block for each "go"; anything else ends the process.
        warmup: steps of a block that are not timed: caches hold what others left there.
        block: steps that are.
        wait: called before the clock is read at a block's ends, and nowhere else: waits for the device.
    """

    def __init__(self, pipe: Connection, warmup: int, block: int, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self._pipe, self._warmup, self._block = pipe, max(1, warmup), block
        self._left = 1
        self._timing = self._warm = False
        self._wall = self._cpu = 0.0

    def tick(self) -> bool:
        """A step is over; True when the loop was stopped behind it for a while."""
        self._left -= 1
        return self._left == 0 and self._turn()

    def _turn(self) -> bool:
        self._wait()
        if self._warm:
            self._warm, self._timing, self._left = False, True, self._block
            self._cpu, self._wall = time.process_time(), time.perf_counter()
            return False
        wall, cpu = time.perf_counter(), time.process_time()
        steps = self._block
        took = Block(wall=(wall - self._wall) / steps, cpu=(cpu - self._cpu) / steps)
        self._pipe.send(took if self._timing else None)
        try:
            word = self._pipe.recv()
        except EOFError:
            word = "stop"
        if word != "go":
            os._exit(0)  # in the middle of somebody else's loop
        self._warm, self._timing, self._left = True, False, self._warmup
        return True
