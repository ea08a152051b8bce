"""ExactPieces: the fixed pieces into which an exact plan cuts each global batch, and their distribution over slices.

Shapes: V pieces of a global batch over W data slices, V / W of them in each.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from grappe.data.device_copy import sent
from grappe.data.sampling import cut
from grappe.launch.world import gather_into
from grappe.plan import Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactPieces:
    """The distribution of a global batch's pieces over data slices."""

    pieces: int
    slices: int
    interleaved: bool
    """Whether a slice has every `slices`-th piece instead of consecutive pieces."""

    @classmethod
    def of(cls, plan: Plan) -> ExactPieces:
        """Returns the pieces of an exact plan."""
        # With sharding, pieces that are reduced together must be neighbours in the summation tree.
        return cls(pieces=plan.exact, slices=plan.data_parallel, interleaved=plan.shard > 1)

    def places(self, data_rank: int) -> range:
        """Returns the numbers of a data slice's pieces."""
        if self.interleaved:
            return range(data_rank, self.pieces, self.slices)
        share = self.pieces // self.slices
        return range(data_rank * share, (data_rank + 1) * share)

    def order(self) -> list[int]:
        """Returns each piece's position in the concatenation of slice 0's pieces, slice 1's pieces, and so on."""
        there = [piece for rank in range(self.slices) for piece in self.places(rank)]
        return sorted(range(self.pieces), key=there.__getitem__)

    def cut(self, everyone: np.ndarray, data_rank: int) -> tuple[np.ndarray, ...]:
        """Cuts the *global* batch's sample ids into the pieces of one slice."""
        return tuple(everyone[a:b] for a, b in self.spans(len(everyone), data_rank))

    def spans(self, samples: int, data_rank: int) -> list[tuple[int, int]]:
        """Returns the begin and the end of a slice's pieces in a global batch of `samples` rows."""
        return [cut(samples, self.pieces, piece) for piece in self.places(data_rank)]

    def gathered(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        """Gathers all slices' rows [V, ...] in the order of pieces, from this slice's [V / W, ...]. Collective."""
        if group is None:
            return tensor
        rows = tensor.new_empty(self.pieces, *tensor.shape[1:])
        gather_into(rows, tensor, group)
        return self.in_order(rows)

    def in_order(self, rows: Tensor) -> Tensor:
        """Returns rows [V, ...], slice 0's pieces first, in the order of pieces."""
        return rows.index_select(0, sent(torch.tensor(self.order()), rows.device))


def rows_of_slices(plan: Plan, samples: int) -> list[np.ndarray]:
    """Returns, for each data slice, the rows of a global batch of `samples` rows that it has: int64 arrays."""
    exact = ExactPieces.of(plan) if plan.exact else None
    indices = []
    for rank in range(plan.data_parallel):
        spans = [cut(samples, plan.data_parallel, rank)] if exact is None else exact.spans(samples, rank)
        indices.append(np.concatenate([np.arange(begin, end) for begin, end in spans]))
    return indices
