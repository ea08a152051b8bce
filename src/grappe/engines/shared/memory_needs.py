"""Needs: the memory that training a model takes, and each process's share of it under a plan."""

from __future__ import annotations

import dataclasses

from grappe.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """The memory of training a whole model, in bytes, without activations."""

    parameters: int
    gradients: int
    optimizer: int
    units: tuple[int, ...]
    """Bytes of parameters, by unit."""
    largest: int = 0
    """Bytes of the largest parameter."""

    @property
    def whole(self) -> int:
        """Sums all three kinds."""
        return self.parameters + self.gradients + self.optimizer

    def of(self, plan: Plan) -> float:
        """Computes the bytes of one process under `plan`: its share, and the parameters gathered at one time."""
        share = self.whole / (plan.shard * plan.pipeline * plan.tensor)
        if plan.shard == 1:
            return share
        return share + 2 * self.unit(plan) + (0 if self.units else self.gradients / plan.pipeline)

    def unit(self, plan: Plan) -> float:
        """Returns the bytes of the largest part that is gathered at once: a unit, or without units the whole model."""
        return max(self.units, default=self.parameters / plan.pipeline)
