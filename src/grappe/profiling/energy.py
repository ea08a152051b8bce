"""Reads the hardware's energy counters; gives the reason if there are none."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnergyCounters:
    """The readable counters, and the reasons why others cannot be read."""

    counters: tuple[Counter, ...]
    missing: str = ""
    """The reason why nothing, or not everything, can be measured; empty if everything can."""


class Powercap:
    """A zone of Linux's powercap tree (RAPL): a processor package, or its memory.

    A zone's counter wraps at `max_energy_range_uj`, 262 kJ on many machines: 45 minutes at 100 W.
    See Documentation/power/powercap/powercap.rst in Linux's source.
    """

    def __init__(self, zone: Path) -> None:
        self.name = (zone / "name").read_text().strip()
        self._file = zone / "energy_uj"
        self._range = int((zone / "max_energy_range_uj").read_text())
        self._last = int(self._file.read_text())
        self._sum = 0

    def joules(self) -> float:
        """Returns the joules since this object was made; call it more often than the hardware's counter wraps."""
        now = int(self._file.read_text())
        self._sum += now - self._last if now >= self._last else now + self._range - self._last
        self._last = now
        return self._sum / 1e6


class Gpu:
    """An NVIDIA GPU, through its management library (NVML); joules need a Volta or newer.

    Raises:
        RuntimeError: the library or the counter is missing.
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
            raise RuntimeError(f"the GPU does not report its energy: {error}") from None

    def joules(self) -> float:
        return (self._query("nvmlDeviceGetTotalEnergyConsumption") - self._first) / 1e3

    def watts(self) -> float:
        """Returns the GPU's present power."""
        return self._query("nvmlDeviceGetPowerUsage") / 1e3

    def limit_watts(self) -> float:
        """Returns the power that the GPU is held below."""
        return self._query("nvmlDeviceGetEnforcedPowerLimit") / 1e3

    def utilisation(self) -> float | None:
        """Returns the share of the last second or less in which a kernel ran, 0 to 1; None: the GPU does not tell."""
        with contextlib.suppress(OSError):
            return self._query("nvmlDeviceGetUtilizationRates").gpu / 100
        return None

    def _query(self, name: str) -> Any:
        """Returns the driver's answer; raises OSError where the GPU has none: it was lost, or shares itself (MIG)."""
        try:
            return getattr(self._nvml, name)(self._handle)
        except self._nvml.NVMLError as error:
            raise OSError(f"the GPU does not report it: {error}") from None


Counter = Powercap | Gpu


def processor_counters(root: Path = POWERCAP) -> EnergyCounters:
    """Finds the counters of packages and their memories: a package's includes its cores, and psys includes all."""
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
    return EnergyCounters(counters=tuple(counters), missing=missing)


def gpu_counters(index: int) -> EnergyCounters:
    """Finds the counter of the GPU that torch calls `index`."""
    try:
        return EnergyCounters(counters=(Gpu(index),))
    except RuntimeError as error:
        return EnergyCounters(counters=(), missing=str(error))


def total(counters: tuple[Counter, ...]) -> float | None:
    """Sums the joules of all counters; None if there is no counter, or one cannot be read any more."""
    if not counters:
        return None
    with contextlib.suppress(OSError, ValueError):
        return sum(counter.joules() for counter in counters)
    return None
