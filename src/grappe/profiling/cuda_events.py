"""Times steps on a GPU by CUDA events, without synchronising."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from grappe.profiling.phases import IN_A_STEP, KEPT, PHASES, WARMUP, WATCHING

SAMPLE = 8  # one step in so many is timed, as each event costs a microsecond


class CudaStepTimer:
    """Times one step in `SAMPLE` by events on the current stream; a step is read once the GPU has passed its events."""

    def __init__(self) -> None:
        self._events: list[tuple[int, Any]] = []
        self._pending: deque[list[tuple[int, Any]]] = deque()
        self._free: list[Any] = []
        self._rows: deque[list[float]] = deque(maxlen=KEPT)

    def lap(self, step: int) -> Callable[[int], None] | None:
        """Ends step number `step`; returns the callback for the next step's phases, None if that step is not timed."""
        if self._events:
            self._pending.append(self._events)
            self._events = []
        self._harvest()
        if step < WARMUP or step % SAMPLE:
            return None
        self.record(WATCHING)
        return self.record

    def record(self, phase: int) -> None:
        """Records an event on the stream, at which `phase` begins."""
        import torch

        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((phase, event))

    def rows(self) -> list[list[float]]:
        """Returns the seconds by phase of each timed step."""
        self._harvest()
        return list(self._rows)

    def _harvest(self) -> None:
        while self._pending and self._pending[0][-1][1].query():
            marks = self._pending.popleft()
            if all(phase <= WATCHING for phase, _ in marks):  # else the GPU evaluated too, between the events
                row = [0.0] * len(PHASES)
                for (phase, began), (_, ended) in itertools.pairwise(marks):
                    row[phase] += began.elapsed_time(ended) / 1e3
                self._rows.append(row[: len(IN_A_STEP)])
            self._free += [event for _, event in marks]
