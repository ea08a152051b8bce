"""The course of a training to its end: what is left of it, what that takes, and the time limit of a job for it."""

from __future__ import annotations

import dataclasses

from grappe.training.options import Options, occasions_left

MARGIN = 0.2  # for what varies: other users of a file system, of a network, of a node
MINUTE, HOUR = 60, 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """Steps, evaluations and saves that are left of a training."""

    steps: int
    evaluations: int
    saves: int

    @classmethod
    def of(cls, options: Options, *, done: int, epochs: int, steps_per_epoch: int) -> Course:
        """Works out what is left behind `done` steps."""
        total = epochs * steps_per_epoch
        last = options.last_step(max(total, options.steps or 0) if options.steps_only else total)
        return cls(
            steps=max(0, last - done),
            evaluations=occasions_left(done, last, options.evaluations_every(steps_per_epoch)),
            saves=occasions_left(done, last, options.saves_every(steps_per_epoch)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of each of a training's parts."""

    step: float
    evaluation: float
    save: float
    start: float
    """From the process's first instruction to the first step."""
    spread: float = 0.0
    """Relative uncertainty: at worst all takes 1 / (1 - spread) times as long."""

    @property
    def slow_step(self) -> float:
        """Computes the seconds of a step, at the pessimistic end."""
        return self.step / (1 - self.spread)

    def seconds(self, course: Course) -> float:
        """Computes the seconds of a training, at the pessimistic end."""
        parts = (
            self.start,
            course.steps * self.step,
            course.evaluations * self.evaluation,
            course.saves * self.save,
        )
        return sum(parts) / (1 - self.spread)


def limit(seconds: float, least: int, most: int | None) -> int:
    """Computes a job's time limit in seconds: with the margin, rounded up to 5 minutes, 15 minutes or an hour.

    Args:
        most: what the site gives at most; None: no limit is known.
    """
    wanted = seconds * (1 + MARGIN)
    unit = 5 * MINUTE if wanted <= 2 * HOUR else 15 * MINUTE if wanted <= 12 * HOUR else HOUR
    found = max(least, unit, -int(-wanted // unit) * unit)
    return found if most is None else min(found, most)
