"""Times each step of a training by phase, as disjoint intervals of the main thread, and summarises them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from grappe.profiling import memory
from grappe.profiling.phases import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    EVALUATION,
    IN_A_STEP,
    KEPT,
    PHASES,
    START,
    WARMUP,
    WATCHING,
)

if TYPE_CHECKING:
    import torch

BLOCKS = 8  # blocks whose steps are kept for medians
NOTHING = [0.0] * len(PHASES)
ORDER_STEPS = 3  # steps after which the parameter whose gradient comes last is settled
SAMPLE = 8  # every eighth step is timed, as each event costs a microsecond, and so does the CPU time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quartiles:
    """Quartiles of the seconds per step: half of the steps lie between `low` and `high`."""

    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Summary of one process's time."""

    clock: str
    """"host", or "device" if the phases of steps were timed by events on a GPU."""
    steps: int
    """Number of steps in the medians, without warm-up."""
    step: Quartiles
    """Seconds of whole steps, without evaluation and saving."""
    phases: Mapping[str, Quartiles]
    """Seconds by phase of a step."""
    means: Mapping[str, float]
    """Mean seconds by phase of a step, over the same steps; their sum is the mean step."""
    totals: Mapping[str, float]
    """Host seconds of the whole training by phase, with warm-up. On a GPU the host runs ahead of the device."""


def timing(clock: str, rows: Any, totals: Sequence[float]) -> StepTimes:
    """Summarises an array of steps, [steps, phases of a step], and total seconds by phase."""
    import numpy as np

    steps = len(rows)
    rows = rows if steps else np.zeros((1, len(IN_A_STEP)))
    columns = np.quantile(np.column_stack([rows.sum(1), rows]), [0.25, 0.5, 0.75], axis=0).T.tolist()
    step, *phases = [Quartiles(median=median, low=low, high=high) for low, median, high in columns]
    return StepTimes(
        clock=clock,
        steps=steps,
        step=step,
        phases=dict(zip(IN_A_STEP, phases, strict=True)),
        means=dict(zip(IN_A_STEP, rows.mean(0).tolist(), strict=True)),
        totals=dict(zip(PHASES, totals, strict=True)),
    )


class Chronometer:
    """A clock that is always in one phase; `switch` costs a tenth of a microsecond.

    The code that begins a phase announces it: the training loop before and after it requests a batch, the engine
    when backward and update begin, `communication.waits_counted` around each wait for other processes. Communication
    that overlaps with computation is not waited for, and so is not counted.

    Args:
        started: when the process began, by time.perf_counter; the time since counts as START.
        data_parallel: whether all processes are data-parallel ones, which wait for each other after the last gradient.
    """

    newest: ClassVar[Chronometer | None] = None
    """Clock of this process's training; None: it has not begun."""

    def __init__(self, device: torch.device, started: float, *, data_parallel: bool = False) -> None:
        Chronometer.newest, self._phase = self, START
        self._around: int | None = None
        self._at = self._lap = started
        self._row = self.last_step = NOTHING.copy()
        """Host seconds of the last step by phase."""
        self._rows = array("d")
        self._kept: list[Any] = []
        self._totals = NOTHING.copy()
        self._steps = self._next_upkeep = 0
        self._window: tuple[int, list[float]] = (0, NOTHING.copy())
        self._data_parallel = data_parallel
        self._last: Any = None  # the parameter whose gradient comes last
        self._hooks: list[Any] = []
        self._cuda = CudaStepTimer() if device.type == "cuda" else None
        self._record: Callable[[int], None] | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        """The engine's optimizer; watchers hook it to see gradients as they are used."""
        self.parameters: list[tuple[str, Any]] = []
        """This process's trained parameters, by name."""
        self.loading = 0.0
        """CPU seconds of the process while its steps wait for data, by those of every eighth step."""
        self._loads: float | None = None
        self.held: dict[str, int] = {}
        """Bytes of parameters, gradients and optimizer state, as of the second update."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Removes all hooks, at the end of the context."""
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def phase(self) -> int:
        """Returns the phase that the time now counts as."""
        return self._phase if self._around is None else self._around

    @property
    def since(self) -> float:
        """Returns when the phase began, by time.perf_counter."""
        return self._at

    def switch(self, phase: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Ends the current phase and begins `phase`."""
        now = clock()
        self._row[self._phase] += now - self._at
        self._at = now
        self._phase = phase
        if self._loads is not None:
            self.loading += SAMPLE * (time.process_time() - self._loads)
        self._loads = time.process_time() if phase == DATA and not (self._steps % SAMPLE or self._around) else None
        if self._record is not None:
            self._record(phase)

    @contextlib.contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Context whose time all counts as `phase`; phases announced inside are ignored."""
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
        """Ends the training's steps; time after the last step, such as an engine's cleanup, counts as START."""
        self.switch(START)
        self._row[START] += sum(self._row[: len(IN_A_STEP)])
        self._row[: len(IN_A_STEP)] = [0.0] * len(IN_A_STEP)

    def end_step(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Ends a step; returns its seconds, without evaluation and saving."""
        now, row = clock(), self._row
        row[self._phase] += now - self._at
        self._phase = WATCHING
        seconds = now - self._lap - row[EVALUATION] - row[CHECKPOINT]
        self._at = self._lap = now
        self._rows.fromlist(row)
        self.last_step, self._row = row, NOTHING.copy()
        self._steps += 1
        if self._steps >= self._next_upkeep:
            self._upkeep()
        return seconds

    def on_optimizer(self, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, Any]]) -> None:
        """Records the engine's optimizer and the parameters that it trains, by name."""
        self.optimizer, self.parameters = optimizer, list(named)
        if self._data_parallel:
            trained = [parameter for _, parameter in named if parameter.requires_grad]
            self._hooks += [parameter.register_post_accumulate_grad_hook(self._gradient_came) for parameter in trained]
        # Not when UPDATE begins: DeepSpeed puts its partitions' gradients together after that.
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

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
        rows = np.concatenate([*self._kept, np.zeros((0, len(PHASES)))])[:, : len(IN_A_STEP)]
        clock = "host"
        if self._cuda is not None and (device := self._cuda.rows()):
            rows, clock = np.array(device), "device"
        elif self._steps <= KEPT * BLOCKS:
            rows = rows[min(WARMUP, max(0, self._steps - 1)) :]
        return timing(clock, rows if self._steps else rows[:0], totals)

    def _upkeep(self) -> None:
        """Does work that is due after some steps only; with CUDA, part of it is due after every step."""
        if self._record is not None:
            self._record(WATCHING)
        if self._steps == ORDER_STEPS:
            self._remove_hooks()  # an optimizer without hooks steps faster
            if self._last is not None:
                # DistributedDataParallel waits for its all-reduces in C++, invisible to Python code. The time after
                # the last gradient is this wait.
                self._hooks.append(self._last.register_post_accumulate_grad_hook(self._computed))
        if len(self._rows) >= KEPT * len(PHASES):
            self._fold()
        if self._cuda is not None:
            self._record = self._cuda.end_step(self._steps)
        elif self._steps >= ORDER_STEPS:
            self._next_upkeep = self._steps + KEPT - len(self._rows) // len(PHASES)

    def _gradient_came(self, parameter: Any) -> None:
        self._last = parameter

    def _computed(self, last: Any) -> None:
        """Switches to COMMUNICATION: after the last gradient backward only waits for other processes."""
        if self._phase == BACKWARD:
            self.switch(COMMUNICATION)

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if self._steps and not self.held:
            self.held = memory.held(optimizer, (parameter for _, parameter in self.parameters))

    def _fold(self) -> None:
        """Adds the steps since the last call to the totals, and keeps them for medians."""
        if not self._rows:
            return
        import numpy as np

        block = np.array(self._rows).reshape(-1, len(PHASES))
        self._kept = [np.concatenate([*self._kept, block])[-BLOCKS * KEPT :]]
        self._totals = [a + float(b) for a, b in zip(self._totals, block.sum(0), strict=True)]
        self._rows = array("d")


class CudaStepTimer:
    """Times one step in `SAMPLE` by events on the current stream; a step is read once the GPU has passed its events."""

    def __init__(self) -> None:
        self._events: list[tuple[int, Any]] = []
        self._pending: deque[list[tuple[int, Any]]] = deque()
        self._free: list[Any] = []
        self._rows: deque[list[float]] = deque(maxlen=KEPT)

    def end_step(self, step: int) -> Callable[[int], None] | None:
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


@contextlib.contextmanager
def waits_counted(chronometer: Chronometer) -> Iterator[None]:
    """Context in which a wait for other processes inside a step is `chronometer`'s COMMUNICATION.

    torch has no hook for waits, so the two functions in which Python code waits are replaced meanwhile: Work.wait, of
    collectives, sends and receives, and wait_tensor, of the functional collectives (FSDP2, tensor parallelism).
    """
    import torch.distributed as dist

    from grappe.private_api.torch import functional_collectives

    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    functional: Any = functional_collectives()
    wait, wait_tensor = dist.Work.wait, functional.wait_tensor
    dist.Work.wait = _counted(wait, chronometer)  # type: ignore[method-assign]
    functional.wait_tensor = _counted(wait_tensor, chronometer)
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]
        functional.wait_tensor = wait_tensor


def _counted(wait: Callable[..., Any], chronometer: Chronometer) -> Callable[..., Any]:
    def counted(*arguments: Any, **keywords: Any) -> Any:
        before = chronometer.phase
        if before > WATCHING or before == COMMUNICATION:
            return wait(*arguments, **keywords)
        chronometer.switch(COMMUNICATION)
        try:
            return wait(*arguments, **keywords)
        finally:
            chronometer.switch(before)

    return counted
