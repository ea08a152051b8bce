"""Expected end: says when a training will have ended, from the steps and evaluations that it has taken so far."""

from __future__ import annotations

import time
from collections.abc import Callable

from grappe.profiling.phases import WARMUP
from grappe.training.options import occasions_left
from grappe.training.watchers.base import RunInfo

AFTER_SECONDS = 60.0  # of steps, before which their pace says little
SOON_SECONDS = 120.0  # a shorter training is over before its expected end is useful
MINUTE, HOUR, DAY = 60, 3600, 86400


def span(seconds: float) -> str:
    """Formats a time to come, rounded to what matters: 3 d 4 h, 2 h 10 min, 35 min."""
    minutes = max(1, round(seconds / MINUTE))
    if seconds >= DAY:
        hours = round(seconds / HOUR)
        return f"{hours // 24} d {hours % 24} h"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


class ExpectedEnd:
    """The expected end of a training, from its pace by the clock since its first steps.

    Args:
        every: steps between evaluations; None: there are none.
        stops_early: whether early stopping may end the training before its last step.
        deadline: the end of the time limit or of the job, as time.time has it; None: there is none.
    """

    def __init__(
        self,
        every: int | None,
        *,
        stops_early: bool = False,
        deadline: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._every, self._stops_early, self._deadline, self._clock = every, stops_early, deadline, clock
        self._info: RunInfo | None = None
        self._began = self._at = 0.0  # of this start; of the newest step or evaluation
        self._first: tuple[int, float] | None = None  # the step and time from which the pace is measured
        self._step = 0
        self._evaluations, self._evaluation_seconds = 0, 0.0
        self._decided = self._shown = False

    def started(self, info: RunInfo) -> None:
        """Begins with the training."""
        self._info, self._step = info, info.start
        self._began = self._at = self._clock()

    def stepped(self, step: int) -> str | None:
        """Counts a step; returns the line on the expected end, once, when the pace is known; not of short trainings."""
        assert self._info is not None
        self._step, self._at = step, self._clock()
        if self._decided:
            return None
        if self._first is None:
            if step >= self._info.start + WARMUP or self._at - self._began >= AFTER_SECONDS:
                self._first = step, self._at
                self._evaluations, self._evaluation_seconds = 0, 0.0
            return None
        if self._at - self._first[1] - self._evaluation_seconds < AFTER_SECONDS or step == self._first[0]:
            return None
        self._decided = True
        left = self._left(step - 1)  # an evaluation of this step is to come
        self._shown = self._at - self._began + left > SOON_SECONDS and step < self._info.last_step
        return self._line(left) if self._shown else None

    def evaluated(self, step: int) -> str:
        """Counts an evaluation; returns the end as it is expected now, for the evaluation's line, or ""."""
        assert self._info is not None
        now = self._clock()
        self._evaluations += 1
        self._evaluation_seconds += now - self._at
        self._at = now
        if not self._shown or step >= self._info.last_step:
            return ""
        end, today = _minute(now + self._left(step)), _minute(now)
        return f"  end {end[11:] if end[:10] == today[:10] else end}"

    def _left(self, evaluated: int) -> float:
        """Computes the seconds to the last step of this start, with the evaluations after the step `evaluated`."""
        assert self._info is not None and self._first is not None
        first, since = self._first
        last = self._info.last_step
        # Saves and all else between the steps are included; evaluations count once one was measured.
        step_seconds = (self._at - since - self._evaluation_seconds) / (self._step - first)
        each = self._evaluation_seconds / self._evaluations if self._evaluations else 0.0
        return (last - self._step) * step_seconds + occasions_left(evaluated, last, self._every) * each

    def _line(self, left: float) -> str:
        assert self._info is not None
        end, info = self._at + left, self._info
        what = "expected end" if info.last_step == info.total_steps else f"expected end of step {info.last_step}"
        parts = [f"in {span(left)}"]
        if self._every is not None:
            parts.append("evaluations included" if self._evaluations else "evaluations not, as none was measured yet")
        if self._stops_early:
            parts.append("early stopping may come before")
        line = f"{what}: {_minute(end)} ({'; '.join(parts)})"
        if self._deadline is not None and self._deadline < end:
            line += (
                f"; the time limit ends it before, {_minute(self._deadline)}: it saves then, and resumes when it is "
                "started again"
            )
        return line


def _minute(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
