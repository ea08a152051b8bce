"""Chronometer: what each step's time goes into, as disjoint intervals of the main thread."""

from __future__ import annotations

import contextlib
import copy
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from grappe import memory
from grappe.device_clock import DeviceClock
from grappe.last_gradient import LastGradient
from grappe.phases import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    EVALUATION,
    FORWARD,
    IN_A_STEP,
    KEPT,
    PHASES,
    START,
    UPDATE,
    WARMUP,
    WATCHING,
)
from grappe.timing import Timing, timing

if TYPE_CHECKING:
    import torch

    from grappe.plan import Plan
    from grappe.task import Task

BLOCKS = 8  # foldings whose steps are kept for medians
NOTHING = [0.0] * len(PHASES)
ORDER_STEPS = 3  # steps that are watched to see which gradient comes last

Waits = Sequence[tuple[Any, str]]
"""Functions, as an object and an attribute's name, in which a process waits for the others."""


class Chronometer:
    """A clock that is always in one phase; `switch` costs a tenth of a microsecond.

    What a step is made of is seen from outside the engine: a step begins when its batch is handed over, its
    backward when `task.loss` has returned, its update when an optimizer is about to step. Every wait for other
    processes inside a step counts as communication, and so does what lies between the last gradient and the
    update. What overlaps with computation is not waited for, and so is not seen here.

    Args:
        started: when the process began, by time.perf_counter; the time since counts as start.
    """

    def __init__(self, device: torch.device, started: float) -> None:
        self.phase = START
        self._at = self._lap = started
        self._row = [0.0] * len(PHASES)
        self._rows = array("d")
        self._blocks: deque[Any] = deque(maxlen=BLOCKS)
        self._totals = [0.0] * len(PHASES)
        self._steps = self._attend = 0
        self._window: tuple[int, list[float]] = (0, list(self._totals))
        self._undo: list[Callable[[], None]] = []
        self._last_gradient = LastGradient(self)
        self.device_clock = DeviceClock() if device.type == "cuda" else None
        self._record: Callable[[int], None] | None = None
        self._told = False
        self._hook: Any = None
        self.held: dict[str, int] = {}
        """Bytes of parameters, gradients and optimizer state, as of the second update."""
        self.parameters: list[tuple[str, Any]] = []
        """This process's, by name, as the engine gave them to the task's optimizer."""
        self.at_update: Callable[[], None] | None = None
        """Called when the gradients are there and are about to be used."""

    def switch(self, phase: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """From now on it is `phase`."""
        now = clock()
        self._row[self.phase] += now - self._at
        self._at = now
        self.phase = phase
        if self._record is not None:
            self._record(phase)

    def tell(self, phase: int) -> None:
        """An engine says that inside of its step it is `phase`; what it does for an evaluation is not that."""
        if FORWARD <= self.phase <= UPDATE:
            self._told = phase == UPDATE
            self.switch(phase)

    @contextlib.contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Inside, it is `phase`."""
        before = self.phase
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def begin(self) -> None:
        """Training begins: what was before is no step's."""
        self.switch(WATCHING)
        self._totals = [a + b for a, b in zip(self._totals, self._row, strict=True)]
        self._row = [0.0] * len(PHASES)
        self._lap = self._at

    def finish(self) -> None:
        """The last step is over: what came behind it, an engine's tidying up say, is no step's; it counts as start."""
        self.switch(START)
        self._row[START] += sum(self._row[: len(IN_A_STEP)])
        self._row[: len(IN_A_STEP)] = [0.0] * len(IN_A_STEP)

    def lap(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """A step is over; its seconds, evaluation and saving left out."""
        now, row = clock(), self._row
        row[self.phase] += now - self._at
        self.phase = WATCHING
        seconds = now - self._lap - row[EVALUATION] - row[CHECKPOINT]
        self._at = self._lap = now
        self._rows.fromlist(row)
        self._row = NOTHING.copy()
        self._steps += 1
        if self._steps >= self._attend:
            self._seldom()
        return seconds

    def _seldom(self) -> None:
        """What is not to be done at each step; on a GPU something is."""
        if self._record is not None:
            self._record(WATCHING)
        if self._steps <= ORDER_STEPS:
            self._last_gradient.step_is_over(self._steps == ORDER_STEPS)
        if self._steps == ORDER_STEPS and self._told and self.at_update is None:
            self._hook.remove()  # the engine says itself when its update begins, and nobody else wants to know
        if len(self._rows) >= KEPT * len(PHASES):
            self._fold()
        if self.device_clock is not None:
            self._record = self.device_clock.lap(self._steps)
        elif self._steps >= ORDER_STEPS:
            self._attend = self._steps + KEPT - len(self._rows) // len(PHASES)

    def forget(self) -> None:
        """The time since the last switch is nobody's: the process was held up from outside."""
        now = time.perf_counter()
        self._lap += now - self._at
        self._at = now

    def window(self) -> tuple[int, dict[str, float]]:
        """How many steps there were since this was last asked, and host seconds in all by phase since then."""
        self._fold()
        (before, earlier), self._window = self._window, (self._steps, list(self._totals))
        spent = {name: now - then for name, now, then in zip(PHASES, self._totals, earlier, strict=True)}
        return self._steps - before, spent

    def timing(self) -> Timing:
        """What there is to say so far."""
        import numpy as np

        self._fold()
        totals = [a + b for a, b in zip(self._totals, self._row, strict=True)]
        totals[self.phase] += time.perf_counter() - self._at
        rows = np.concatenate([*self._blocks, np.zeros((0, len(PHASES)))])[:, : len(IN_A_STEP)]
        clock = "host"
        if self.device_clock is not None and (device := self.device_clock.rows()):
            rows, clock = np.array(device), "device"
        elif self._steps <= KEPT * BLOCKS:
            rows = rows[min(WARMUP, max(0, self._steps - 1)) :]
        return timing(clock, rows if self._steps else rows[:0], totals)

    def watch(self, task: Task, plan: Plan, waits: Waits = ()) -> Task:
        """The same task, whose loss, optimizer and model tell where in a step an engine is.

        Args:
            waits: functions in which the engine waits for other processes, beyond torch.distributed's.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        watched = copy.copy(task)
        # A frozen dataclass: what is in the instance hides the class's methods.
        parts = watched.__dict__
        parts["loss"] = self._loss(task.loss)
        if plan.microbatches > 1 and not plan.recompute:  # recomputation runs the forward inside backward
            parts["model"] = self._model(task.model)
        alike = plan.data_parallel > 1 and plan.data_parallel == plan.processes
        parts["optimizer"] = self._optimizer(task.optimizer, alike)
        self._hook = register_optimizer_step_pre_hook(self._before_update)
        self._undo.append(self._hook.remove)
        if plan.processes > 1:
            self._watch_waits(waits)
        return watched

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Takes back what `watch` has put elsewhere."""
        while self._undo:
            self._undo.pop()()
        self._last_gradient.close()

    def _loss(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def timed(output: Any, target: Any) -> Any:
            values = loss(output, target)
            if self.phase == FORWARD:  # an evaluation has losses too
                self.switch(BACKWARD)
            return values

        return timed

    def _optimizer(self, make: Callable[[Any], Any], find_last: bool) -> Callable[[Any], Any]:
        def watched(named_parameters: Any) -> Any:
            self.parameters = list(named_parameters)
            if find_last:
                self._last_gradient.look_for([parameter for _, parameter in self.parameters])
            return make(list(self.parameters))

        return watched

    def _model(self, model: Callable[[], Any]) -> Callable[[], Any]:
        def began(module: Any, inputs: Any) -> None:
            if self.phase in (BACKWARD, COMMUNICATION):  # another microbatch
                self.switch(FORWARD)

        def watched() -> Any:
            made = model()
            made.register_forward_pre_hook(began)
            return made

        return watched

    def _before_update(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if self.phase in (BACKWARD, COMMUNICATION):
            self.switch(UPDATE)
        if self._steps == 1 and not self.held:
            self.held = memory.held(optimizer, (parameter for _, parameter in self.parameters))
        if self.at_update is not None:
            self.at_update()

    def _watch_waits(self, more: Waits) -> None:
        import torch.distributed as dist
        import torch.distributed._functional_collectives as functional

        for owner, name in ((dist.Work, "wait"), (functional, "wait_tensor"), *more):
            original = getattr(owner, name)
            setattr(owner, name, self._waiting(original))
            self._undo.append(
                lambda owner=owner, name=name, original=original: setattr(owner, name, original)
            )

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            before = self.phase
            if before > WATCHING or before == COMMUNICATION:
                return wait(*arguments, **keywords)
            self.switch(COMMUNICATION)
            try:
                return wait(*arguments, **keywords)
            finally:
                self.switch(before)

        return timed

    def _fold(self) -> None:
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
