"""GatheredSlices: gathers tensors with a row for each sample from all data slices, in the global batch's order.

Shapes: a global batch of B rows, b of them in this process's slice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from grappe.data.device_copy import sent
from grappe.data.pieces import rows_of_slices
from grappe.launch.world import World, gather_into
from grappe.plan import Plan
from grappe.step.exact.sums import wire


class GatheredSlices:
    """Gathers tensors with a row for each sample from all data slices, in the order of the global batch."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self._world = plan, world
        self._wire = wire(world)
        self._layouts: dict[int, Layout] = {}
        self._now = Layout.of(plan, world, 1)

    def begin(self, samples: int) -> None:
        """Begins with a global batch of `samples` rows."""
        self._now = self._layout(samples)

    def has_empty(self, samples: int) -> bool:
        """Returns whether a slice of a global batch of `samples` rows has none."""
        return self._layout(samples).has_empty

    def _layout(self, samples: int) -> Layout:
        if samples not in self._layouts:
            self._layouts[samples] = Layout.of(self._plan, self._world, samples)
        return self._layouts[samples]

    @property
    def has_first(self) -> bool:
        """Returns whether the global batch's first row is this process's."""
        return self._now.has_first

    def mine(self, rows: Tensor) -> Tensor:
        """Returns this slice's rows [b, ...] of `rows` [B, ...]."""
        return rows.index_select(0, self._now.mine)

    def gathered(self, mine: Tensor) -> Tensor:
        """Gathers [B, ...] from every slice's [b, ...]; gradients go to this slice's own rows alone. Collective."""
        group = self._world.data_group
        if group is None:
            return mine
        row = mine.shape[1:]
        sent = mine.detach().new_zeros(self._now.largest, *row)
        sent[: len(mine)] = mine.detach()
        # As bytes: gloo takes few types.
        bytes_of = sent.reshape(self._now.largest, -1).contiguous().view(torch.uint8).to(self._wire)
        everyone = bytes_of.new_empty(self._world.data_size * self._now.largest, bytes_of.shape[1])
        gather_into(everyone, bytes_of, group)
        rows = everyone.to(mine.device).view(mine.dtype).view(-1, *row).index_select(0, self._now.order)
        return rows.index_copy(0, self._now.mine, mine) if mine.requires_grad else rows


class Layout(NamedTuple):
    """The rows of a global batch of one size, by data slice."""

    largest: int
    """The rows of the largest slice."""
    order: Tensor
    """By row of the global batch, its row in what is gathered: slices of `largest` rows each."""
    mine: Tensor
    """By row of this slice, its row in the global batch."""
    has_first: bool
    """True if the global batch's first row is this slice's."""
    has_empty: bool
    """True if a slice has no row."""

    @classmethod
    def of(cls, plan: Plan, world: World, samples: int) -> Layout:
        """Computes the layout of a global batch of `samples` rows."""
        slices = rows_of_slices(plan, samples)
        largest = max(1, *(len(one) for one in slices))
        order = np.empty(samples, dtype=np.int64)
        for rank, rows in enumerate(slices):
            order[rows] = rank * largest + np.arange(len(rows))
        mine = slices[world.data_rank]
        device = world.device
        return cls(
            largest,
            sent(torch.from_numpy(order), device),
            sent(torch.from_numpy(mine), device),
            bool(len(mine)) and int(mine[0]) == 0,
            any(not len(one) for one in slices),
        )
