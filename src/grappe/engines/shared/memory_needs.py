"""Needs: the memory that training a model takes, and each process's share of it under a plan."""

from __future__ import annotations

import dataclasses

from grappe.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """What training a whole model takes, in bytes, activations left out."""

    parameters: int
    gradients: int
    optimizer: int
    units: tuple[int, ...]
    """Parameters by unit."""
    largest: int = 0
    """The largest parameter."""

    @property
    def whole(self) -> int:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer

    def of(self, plan: Plan) -> float:
        """Of one process under `plan`: its share, and what is whole for a moment."""
        share = self.whole / (plan.shard * plan.pipeline * plan.tensor)
        if plan.shard == 1:
            return share
        return share + 2 * self.unit(plan) + (0 if self.units else self.gradients / plan.pipeline)

    def unit(self, plan: Plan) -> float:
        """The largest of what is whole at once: a unit, or without units all that a process has."""
        return max(self.units, default=self.parameters / plan.pipeline)
