"""ExactPieces: the fixed pieces that an exact plan cuts each global batch into, and which data slice has which.

Shapes: V pieces of a global batch over W data slices, V / W of them in each.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from grappe.data.order import cut
from grappe.launch.world import gather_into
from grappe.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactPieces:
    """How the pieces of a global batch are distributed over data slices."""

    pieces: int
    slices: int
    interleaved: bool
    """Whether a slice has every `slices`-th piece, not consecutive ones."""

    @classmethod
    def of(cls, plan: Plan) -> ExactPieces | None:
        """The plan's; None where it is not exact."""
        if not plan.exact:
            return None
        # With sharding, pieces that are reduced together must be neighbours in the summation tree.
        return cls(pieces=plan.exact, slices=plan.data_parallel, interleaved=plan.shard > 1)

    def places(self, data_rank: int) -> range:
        """Which pieces a data slice has."""
        if self.interleaved:
            return range(data_rank, self.pieces, self.slices)
        share = self.pieces // self.slices
        return range(data_rank * share, (data_rank + 1) * share)

    def order(self) -> list[int]:
        """Where each piece is among those of slice 0, then slice 1, and so on."""
        there = [piece for rank in range(self.slices) for piece in self.places(rank)]
        return sorted(range(self.pieces), key=there.__getitem__)

    def cut(self, everyone: np.ndarray, data_rank: int) -> tuple[np.ndarray, ...]:
        """The pieces of a slice, of the sample ids of the *global* batch; together they are the slice."""
        bounds = [cut(len(everyone), self.pieces, piece) for piece in self.places(data_rank)]
        return tuple(everyone[a:b] for a, b in bounds)

    def gathered(self, mine: Tensor, group: ProcessGroup | None) -> Tensor:
        """Everyone's rows [V, ...] in the order of pieces, from this slice's [V / W, ...]. Collective."""
        if group is None:
            return mine
        rows = mine.new_empty(self.pieces, *mine.shape[1:])
        gather_into(rows, mine, group)
        return rows[self.order()]
