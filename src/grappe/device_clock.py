"""Device clock: what a step takes on a GPU, by events on its stream that nobody waits for."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from grappe.phases import IN_A_STEP, KEPT, PHASES, WARMUP, WATCHING

SAMPLE = 8  # one step in so many is timed, as each event costs a microsecond


class DeviceClock:
    """Times one step in `SAMPLE` by events on the GPU's stream, which nobody waits for."""

    def __init__(self) -> None:
        self._events: list[tuple[int, Any]] = []
        self._pending: deque[list[tuple[int, Any]]] = deque()
        self._free: list[Any] = []
        self._rows: deque[list[float]] = deque(maxlen=KEPT)

    def lap(self, step: int) -> Callable[[int], None] | None:
        """A step is over; what to call at each switch of the next one."""
        if self._events:
            self._pending.append(self._events)
            self._events = []
        self._harvest()
        if step < WARMUP or step % SAMPLE:
            return None
        self.record(WATCHING)
        return self.record

    def record(self, phase: int) -> None:
        """From this place on the stream it is `phase`."""
        import torch

        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((phase, event))

    def rows(self) -> list[list[float]]:
        """Seconds by phase of each step that was timed."""
        self._harvest()
        return list(self._rows)

    def _harvest(self) -> None:
        while self._pending and self._pending[0][-1][1].query():
            marks = self._pending.popleft()
            row = [0.0] * len(PHASES)
            for (phase, began), (_, ended) in itertools.pairwise(marks):
                row[phase] += began.elapsed_time(ended) / 1e3
            if not any(row[WATCHING + 1 :]):  # an evaluation in between: the device was not a step's alone
                self._rows.append(row[: len(IN_A_STEP)])
            self._free += [event for _, event in marks]
