"""Limits of this process: cores and memory of its control groups, RLIMIT_DATA, and the machine's memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from grappe.profiling import memory

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
SMALL_PART = 50
"""Times a size that must be left, for the size to count as small."""
UNLIMITED = 1 << 60  # bytes: version 1 writes a number near 2**63 where there is no limit


def folders(controller: Literal["cpu", "memory"], root: Path = CGROUPS, own: Path = OWN_CGROUP) -> Iterator[Path]:
    """Yields the folders of this process's control group and of those above it, of version 2 and 1, that may be there.

    Args:
        controller: its hierarchy is read in version 1, which has a hierarchy for each.
    """
    lines = []
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in own.read_text().splitlines() if line.count(":") >= 2]
    paths = {"": "", controller: ""}
    paths |= {name: path for _, several, path in lines for name in several.split(",")}
    for base, path in ((root, paths[""]), (root / controller, paths[controller])):
        folder = base.joinpath(*[part for part in path.split("/") if part])
        # In a container, the path may be the one outside of the container.
        for above in (folder, *folder.parents):
            if above.is_relative_to(base) and ".." not in above.parts:
                yield above


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """Reads the lowest CPU quota of this process's control groups, in whole cores, at least 1; None: no quota."""
    quotas = []
    for folder in folders("cpu", root, own):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota not in ("max", "-1"):
                quotas.append(max(1, int(quota) // int(period)))
    return min(quotas, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """A control group whose memory is limited: of a Slurm job (`--mem`), or a container.

    The kernel kills one of its processes where they need more.
    """

    size: int
    """Bytes that its processes may have together."""
    free: int
    """Bytes that they can still have; files' cached pages, which the kernel gives up first, are among them."""


def control_group(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> ControlGroup | None:
    """Returns the control group that leaves this process the least memory, of version 2 or 1; None: none limits it."""
    groups = []
    for folder in folders("memory", root, own):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            names, prefix = ("memory.max", "memory.current"), ""
            if not (folder / names[0]).exists():
                names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
            texts = ((folder / name).read_text().strip() for name in names)
            size, used = (UNLIMITED if text == "max" else int(text) for text in texts)
            if size < UNLIMITED:
                stat = _numbers(folder / "memory.stat")
                cached = stat[f"{prefix}inactive_file"] + stat[f"{prefix}active_file"]
                groups.append(ControlGroup(size=size, free=max(0, size - used + cached)))
    return min(groups, key=lambda group: group.free, default=None)


def killed(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Counts the processes that the kernel has killed for want of memory in this process's control groups.

    In version 1 only the killed process's group counts, whether it or one above has the limit; in version 2 all do.
    """
    count = 0
    for folder in folders("memory", root, own):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                count += _numbers(folder / name).get("oom_kill", 0)
    return count


def free(meminfo: Path = MEMINFO) -> int | None:
    """Returns the bytes that the processes here can still have together; None if the system does not report them."""
    left = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        left.append(_numbers(meminfo)["MemAvailable:"] * 1024)
    group = control_group()
    if group is not None:
        left.append(group.free)
    return min(left, default=None)


def has_room(size: int, processes: int = 1, *, peak_known: bool = True) -> bool:
    """Returns whether this process may take `size` bytes more, and then grow to its peak besides.

    The peak is what a step needs, so the next step will need it again.

    Args:
        processes: the number of processes here that do the same.
        peak_known: whether this process has reached its peak; if not, `size` must be a small part of what is left.
    """
    needed = size + memory.below_peak() if peak_known else SMALL_PART * size
    own = memory.data_limit()
    if own is not None and memory.data_size() + needed > own:
        return False
    left = free()
    return left is None or needed * processes <= left


def _numbers(file: Path) -> Mapping[str, int]:
    """Reads lines of a name, a number, and perhaps its unit."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
