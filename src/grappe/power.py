"""Power: joules and watts, read from the counters that the hardware keeps; where there are none, the reason."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Protocol

POWERCAP = Path("/sys/class/powercap")


class Counter(Protocol):
    """Something that counts joules."""

    name: str

    def joules(self) -> float:
        """Joules since it was made; to be read often enough that its hardware does not wrap unseen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The counters there are, and why there are no others."""

    counters: tuple[Counter, ...]
    missing: str = ""
    """Why nothing, or less than all, can be measured; empty: all can."""


class Powercap:
    """One zone of Linux's powercap tree (RAPL): a processor package, or its memory.

    Its counter wraps at `max_energy_range_uj`, 262 kJ on many machines: 45 minutes at 100 W.
    See Documentation/power/powercap/powercap.rst in Linux's source.
    """

    def __init__(self, zone: Path) -> None:
        self.name = (zone / "name").read_text().strip()
        self._file = zone / "energy_uj"
        self._range = int((zone / "max_energy_range_uj").read_text())
        self._last = int(self._file.read_text())
        self._sum = 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        self._sum += now - self._last if now >= self._last else now + self._range - self._last
        self._last = now
        return self._sum / 1e6


class Gpu:
    """One NVIDIA GPU, through its management library; joules need a Volta or newer.

    Raises:
        RuntimeError: the library or the counter is not there.
    """

    def __init__(self, index: int) -> None:
        try:
            import pynvml
        except ImportError:
            raise RuntimeError("nvidia-ml-py is not installed: pip install 'grappe[energy]'") from None
        import torch

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            identity = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
            self._handle: Any = pynvml.nvmlDeviceGetHandleByUUID(identity)
            self.name = pynvml.nvmlDeviceGetName(self._handle)
            self._first = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except (pynvml.NVMLError, AttributeError) as error:
            raise RuntimeError(f"the GPU does not tell its energy: {error}") from None

    def joules(self) -> float:
        return (self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) - self._first) / 1e3

    def watts(self) -> float:
        """Its power now."""
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3

    def utilisation(self) -> float:
        """The share of the last second or less in which a kernel ran, 0 to 1."""
        return self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100  # pyrefly: ignore


def processor_counters(root: Path = POWERCAP) -> Found:
    """The packages' counters and their memories'. Cores and graphics are inside the package; psys is around it all."""
    counters: list[Counter] = []
    missing = "" if root.is_dir() else "this machine has no powercap"
    for zone in sorted(root.glob("*:*")) if root.is_dir() else []:
        try:
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                counters.append(Powercap(zone))
        except PermissionError:
            missing = f"{zone / 'energy_uj'} is for root only: chmod o+r it, or ask your administrator"
        except (OSError, ValueError) as error:
            missing = f"{zone} cannot be read: {error}"
    if not counters and not missing:
        missing = f"there is no processor in {root}"
    return Found(counters=tuple(counters), missing=missing)


def gpu_counters(index: int) -> Found:
    """The counter of the GPU that torch calls `index`."""
    try:
        return Found(counters=(Gpu(index),))
    except RuntimeError as error:
        return Found(counters=(), missing=str(error))


def total(counters: tuple[Counter, ...]) -> float | None:
    """Joules of all; None where there are none, or one of them has gone."""
    if not counters:
        return None
    with contextlib.suppress(OSError, ValueError):
        return sum(counter.joules() for counter in counters)
    return None
