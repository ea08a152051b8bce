"""Fabric: a job's GPUs, and what messages between them take, within a node and between nodes."""

from __future__ import annotations

import dataclasses

from grappe.errors import PlanError
from grappe.foresight.devices import LEAST, OF_BANDWIDTH, Device
from grappe.plan import Plan

OF_NETWORK = 0.8
"""Share of a network's nominal rate that large messages reach: an assumption, not measured."""
NETWORK_LEAST = 20e-6
"""Seconds of a message between nodes that has next to nothing to carry: an assumption."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fabric:
    """Nodes of equal GPUs; a plan's ranks fill one node after the other."""

    device: Device
    node: int = 1
    """GPUs of a node."""
    network_gbit: float | None = None
    """Gb/s of all of a node's network adapters together, in one direction; None: unknown."""

    def refuse_unknown(self, plan: Plan) -> None:
        """Raises PlanError for a plan that needs a network of which nothing is known."""
        if plan.processes > max(1, self.node) and self.network_gbit is None:
            raise PlanError(
                f"{plan.processes} GPUs, and a node has {self.node}: the rate of the network between nodes is not "
                "known here (network_gbit in the site's file), so the time is not foreseen"
            )

    def all_reduce(self, size: float, degree: int, stride: int = 1) -> float:
        """Computes the seconds of a ring's all-reduce of `size` bytes (Patarasuk and Yuan 2009).

        A ring crosses each node's border once in each direction, so that its slowest link is the node's network
        (as nccl-tests has bus bandwidth, doc/PERFORMANCE.md).

        Args:
            degree: processes that reduce together.
            stride: ranks from one of them to the next: 1, or the product of the axes inside theirs.
        """
        if degree == 1:
            return 0.0
        return 2 * (degree - 1) / degree * size / self._rate(degree, stride)

    def message(self, size: float, degree: int, stride: int = 1) -> float:
        """Computes the seconds of a message of `size` bytes to the next of `degree` processes."""
        least = NETWORK_LEAST if self._crosses(degree, stride) else LEAST
        return least + size / self._rate(degree, stride)

    def _crosses(self, degree: int, stride: int) -> bool:
        return degree * stride > max(1, self.node)

    def _rate(self, degree: int, stride: int) -> float:
        """Returns the bytes/s of the slowest link: all groups of a node that leave it share its network."""
        link = self.device.link_gb * 1e9 * OF_BANDWIDTH
        if not self._crosses(degree, stride):
            return link
        assert self.network_gbit is not None
        groups = min(stride, self.node)
        return min(link, self.network_gbit * 1e9 / 8 * OF_NETWORK / groups)
