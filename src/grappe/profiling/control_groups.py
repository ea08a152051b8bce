"""Control groups: finds those that this process is in, and reads the limit of its cores that they set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def folders(
    controller: Literal["cpu", "memory"], root: Path = CGROUPS, own: Path = OWN_CGROUP
) -> Iterator[Path]:
    """Yields the folders of this process's control group and of those above it, of version 2 and 1, that may be there.

    Args:
        controller: whose hierarchy is looked at in version 1, which has one for each.
    """
    lines = []
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in own.read_text().splitlines() if line.count(":") >= 2]
    paths = {
        "": "",
        controller: "",
        **{name: path for _, several, path in lines for name in several.split(",")},
    }
    for base, path in ((root, paths[""]), (root / controller, paths[controller])):
        folder = base.joinpath(*[part for part in path.split("/") if part])
        # In a container, the path may be that outside of it.
        yield from (
            one for one in (folder, *folder.parents) if one.is_relative_to(base) and ".." not in one.parts
        )


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """Reads the least CPU quota of this process's control groups, in whole cores, at least 1; None without a quota."""
    found = [quota for folder in folders("cpu", root, own) if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def _quota(folder: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        if quota not in ("max", "-1"):
            return max(1, int(quota) // int(period))
    return None
