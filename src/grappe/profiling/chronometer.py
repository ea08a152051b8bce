"""Times each step of a training by phase, as disjoint intervals of the main thread."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from grappe.profiling import memory
from grappe.profiling.cuda_events import CudaStepTimer
from grappe.profiling.last_gradient import LastGradient
from grappe.profiling.phases import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    EVALUATION,
    IN_A_STEP,
    KEPT,
    PHASES,
    START,
    WARMUP,
    WATCHING,
)
from grappe.profiling.summary import StepTimes, timing

if TYPE_CHECKING:
    import torch

BLOCKS = 8  # blocks whose steps are kept for medians
NOTHING = [0.0] * len(PHASES)
ORDER_STEPS = 3  # steps after which it is known which gradient comes last


class Chronometer:
    """A clock that is always in one phase; `switch` costs a tenth of a microsecond.

    The code that begins a phase announces it: the training loop before and after it requests a batch, the engine
    when backward and update begin, `communication.waits_counted` around each wait for other processes. Communication
    that overlaps with computation is not waited for, and so is not counted.

    Args:
        started: when the process began, by time.perf_counter; the time since counts as START.
        data_parallel: whether all processes are data-parallel ones, which wait for each other after the last gradient.
    """

    def __init__(self, device: torch.device, started: float, *, data_parallel: bool = False) -> None:
        self._phase = START
        self._around: int | None = None
        self._at = self._lap = started
        self._row = NOTHING.copy()
        self._rows = array("d")
        self._blocks: deque[Any] = deque(maxlen=BLOCKS)
        self._totals = NOTHING.copy()
        self._steps = self._next_upkeep = 0
        self._window: tuple[int, list[float]] = (0, NOTHING.copy())
        self._data_parallel = data_parallel
        self._last_gradient = LastGradient(self._computed)
        self._cuda = CudaStepTimer() if device.type == "cuda" else None
        self._record: Callable[[int], None] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        """The engine's; to be hooked by who wants to see gradients as they are used."""
        self.parameters: list[tuple[str, Any]] = []
        """This process's trained parameters, by name."""
        self.held: dict[str, int] = {}
        """Bytes of parameters, gradients and optimizer state, as of the second update."""
        self._held_hook: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Removes all hooks, at the end of the context."""
        self._last_gradient.close()
        if self._held_hook is not None:
            self._held_hook.remove()

    @property
    def phase(self) -> int:
        """Returns the phase that the time now counts as."""
        return self._phase if self._around is None else self._around

    @property
    def since(self) -> float:
        """Returns when the phase began, by time.perf_counter."""
        return self._at

    def so_far(self, phase: int) -> float:
        """Returns the seconds of `phase` in this step so far."""
        running = time.perf_counter() - self._at if self._phase == phase else 0.0
        return self._row[phase] + running

    def switch(self, phase: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Ends the current phase and begins `phase`."""
        now = clock()
        self._row[self._phase] += now - self._at
        self._at = now
        self._phase = phase
        if self._record is not None:
            self._record(phase)

    @contextlib.contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Context whose whole time counts as `phase`; phases announced inside are ignored."""
        before, row = self._phase, self._row
        self.switch(phase)
        began, self._row, self._around = self._at, NOTHING.copy(), phase
        try:
            yield
        finally:
            self.switch(before)
            self._row, self._around = row, None
            row[phase] += self._at - began

    def begin(self) -> None:
        """Begins a step now: the time before counts in the totals, and in no step."""
        self.switch(WATCHING)
        self._totals = [a + b for a, b in zip(self._totals, self._row, strict=True)]
        self._row = NOTHING.copy()
        self._lap = self._at

    def finish(self) -> None:
        """Ends the training's steps; the time since the last one, an engine's cleanup say, counts as START."""
        self.switch(START)
        self._row[START] += sum(self._row[: len(IN_A_STEP)])
        self._row[: len(IN_A_STEP)] = [0.0] * len(IN_A_STEP)

    def lap(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Ends a step; returns its seconds, without evaluation and saving."""
        now, row = clock(), self._row
        row[self._phase] += now - self._at
        self._phase = WATCHING
        seconds = now - self._lap - row[EVALUATION] - row[CHECKPOINT]
        self._at = self._lap = now
        self._rows.fromlist(row)
        self._row = NOTHING.copy()
        self._steps += 1
        if self._steps >= self._next_upkeep:
            self._upkeep()
        return seconds

    def on_optimizer(self, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, Any]]) -> None:
        """Records the engine's optimizer and the parameters that it trains, by name."""
        self.optimizer, self.parameters = optimizer, list(named)
        if self._data_parallel:
            self._last_gradient.look_for([parameter for _, parameter in named])
        # Not when UPDATE begins: DeepSpeed puts its partitions' gradients together after that.
        self._held_hook = optimizer.register_step_pre_hook(self._before_step)

    def spent(self) -> tuple[int, list[float]]:
        """Returns the number of steps so far, and their host seconds by phase."""
        self._fold()
        return self._steps, list(self._totals)

    def window(self) -> tuple[int, dict[str, float]]:
        """Returns the number of steps, and their host seconds by phase, since the last call."""
        (before, earlier), self._window = self._window, self.spent()
        spent = {name: now - then for name, now, then in zip(PHASES, self._totals, earlier, strict=True)}
        return self._steps - before, spent

    def timing(self) -> StepTimes:
        """Returns the summary of the training so far."""
        import numpy as np

        self._fold()
        totals = [a + b for a, b in zip(self._totals, self._row, strict=True)]
        totals[self._phase] += time.perf_counter() - self._at
        rows = np.concatenate([*self._blocks, np.zeros((0, len(PHASES)))])[:, : len(IN_A_STEP)]
        clock = "host"
        if self._cuda is not None and (device := self._cuda.rows()):
            rows, clock = np.array(device), "device"
        elif self._steps <= KEPT * BLOCKS:
            rows = rows[min(WARMUP, max(0, self._steps - 1)) :]
        return timing(clock, rows if self._steps else rows[:0], totals)

    def _upkeep(self) -> None:
        """Does work that not every step needs; with CUDA, some of it after every step."""
        if self._record is not None:
            self._record(WATCHING)
        if self._steps == ORDER_STEPS:
            self._last_gradient.decide()
            if self._held_hook is not None:  # an optimizer without hooks steps faster
                self._held_hook.remove()
        if len(self._rows) >= KEPT * len(PHASES):
            self._fold()
        if self._cuda is not None:
            self._record = self._cuda.lap(self._steps)
        elif self._steps >= ORDER_STEPS:
            self._next_upkeep = self._steps + KEPT - len(self._rows) // len(PHASES)

    def _computed(self, last: Any) -> None:
        """Begins waiting: the last gradient has arrived, and backward has nothing more to compute."""
        if self._phase == BACKWARD:
            self.switch(COMMUNICATION)

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if self._steps and not self.held:
            self.held = memory.held(optimizer, (parameter for _, parameter in self.parameters))

    def _fold(self) -> None:
        """Adds the steps since the last call to the totals, and keeps them as a block for medians."""
        if not self._rows:
            return
        import numpy as np

        block = np.array(self._rows).reshape(-1, len(PHASES))
        self._blocks.append(block)
        if len(block) < KEPT and len(self._blocks) > 1 and len(self._blocks[-2]) < KEPT:
            late = self._blocks.pop()
            self._blocks[-1] = np.concatenate([self._blocks[-1], late])
        self._totals = [a + float(b) for a, b in zip(self._totals, block.sum(0), strict=True)]
        self._rows = array("d")
