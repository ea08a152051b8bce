"""Devices: GPUs by their data sheets, one TOML file each, and the assumptions by which times are foreseen on them."""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.errors import PlanError

if TYPE_CHECKING:
    from grappe.foresight.trace import Operator

REFERENCE = "V100, 16 GB"
"""The GPU that a model is compared with where no other is known: the slowest that sites have."""
OF_PEAK = 0.55
"""Share of the peak FLOP/s that large matrix products and convolutions reach: an assumption, not measured."""
OF_BANDWIDTH = 0.75
"""Share of the bandwidth that a kernel reaches that moves much: an assumption, not measured."""
LEAST = 3e-6
"""Seconds of a kernel that has next to nothing to do: an assumption."""
LAUNCH = {"forward": 20e-6, "backward": 10e-6, "update": 6e-6, "view": 3e-6}
"""Seconds of the host for an operator, with Python and autograd: an assumption."""
STEP = 300e-6
"""Seconds of the host for all else of a step: an assumption."""
SPLIT = 300e-6
"""Seconds of the host for a module that is split over processes, forward and backward: an assumption."""
PASS = 200e-6
"""Seconds of the host for a pass of a pipeline's stage, with its messages: an assumption."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """GPU specification from the vendor's data sheet."""

    title: str
    names: tuple[str, ...]
    """Names that sites give it."""
    reported: tuple[str, ...]
    """Names by which torch reports it."""
    source: str
    generation: str
    """Architecture, with NVIDIA's compute capability or AMD's name."""
    memory_gb: str
    """GB of memory; of a model that is sold with two sizes, both."""
    tflops: dict[str, float]
    """Peak TFLOP/s by precision, without sparsity."""
    bandwidth_gb: float
    """GB/s of its memory."""
    link_gb: float
    """GB/s to the other GPUs of its node, in one direction."""
    watts: float

    def flops(self, precision: str) -> float:
        """Returns the peak FLOP/s.

        Raises:
            PlanError: the GPU has no units for it.
        """
        if precision not in self.tflops:
            raise PlanError(f"precision={precision}: {self.title} has no units for it (see grappe doctor)")
        return self.tflops[precision] * 1e12

    def kernel(self, operator: Operator, precision: str) -> float:
        """Computes the seconds of an operator's kernel: by the roofline of Williams et al. (2009).

        Views and collectives take 0: a collective's time is counted with its message.
        """
        if operator.view or operator.collective:
            return 0.0
        computing = operator.flops / (self.flops(precision) * OF_PEAK)
        moving = operator.moved / (self.bandwidth_gb * 1e9 * OF_BANDWIDTH)
        return max(LEAST, computing, moving)


def device_named(name: str) -> Device | None:
    """Finds a device by a site's name for it; None: it has no data sheet here."""
    return next((device for device in devices() if name in device.names), None)


def device_reported(name: str) -> Device | None:
    """Finds a device by torch's name for it; None: it has no data sheet here."""
    return next((device for device in devices() if name in device.reported), None)


@functools.cache
def devices() -> tuple[Device, ...]:
    """Reads all data sheets."""
    return tuple(_read(file) for file in sorted(Path(__file__).parent.glob("*.toml")))


def kernel_seconds(device: Device, operators: Iterable[Operator], precision: str) -> float:
    """Sums the seconds of operators' kernels."""
    return math.fsum(device.kernel(operator, precision) for operator in operators)


def _read(file: Path) -> Device:
    content: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    names, reported = (tuple(content.pop(key)) for key in ("names", "reported"))
    return Device(names=names, reported=reported, **content)
