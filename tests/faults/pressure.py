"""Reads how long the machine's processes have waited for a core, so that times can be judged on a busy machine."""

from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")


def waited() -> float:
    """Seconds in which any process of the machine waited for a core; 0 where the kernel does not tell."""
    try:
        return int(PRESSURE.read_text().split()[4].partition("=")[2]) / 1e6
    except (OSError, IndexError):
        return 0.0
