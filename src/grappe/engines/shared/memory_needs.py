"""Needs: the memory of a whole model's parts, of which engines compute what an offload to a disk takes."""

from __future__ import annotations

import dataclasses

from grappe.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """The memory of a whole model's parts, in bytes."""

    parameters: int
    gradients: int
    units: tuple[int, ...]
    """Bytes of parameters, by unit."""
    largest: int
    """Bytes of the largest parameter."""

    def unit(self, plan: Plan) -> float:
        """Returns the bytes of the largest part that is gathered at once: a unit, or without units the whole model."""
        return max(self.units, default=self.parameters / plan.pipeline)
