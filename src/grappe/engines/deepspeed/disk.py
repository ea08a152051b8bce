"""The folder of offload=nvme: is checked, and holds a temporary folder for each training."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
from pathlib import Path

from grappe.engines.deepspeed import library, settings
from grappe.engines.shared.memory_needs import Needs
from grappe.errors import PlanError
from grappe.launch.world import World
from grappe.plan import Plan

BYTES_EACH = 20
"""For each number: the parameter, its copy beside the optimizer, Adam's two moments, and the gradient in passing."""
PREFIX = "grappe-"
TO_BE_NAMED = "offload=nvme:FOLDER"
LIBRARY_BYTES = 180_000_000
"""What DeepSpeed itself, its operators and its threads' stacks take, as RLIMIT_DATA counts it: 183 MB when measured."""


def problem(folder: Path) -> str | None:
    """Returns the reason why DeepSpeed cannot use `folder`; None: no reason."""
    name = f"offload=nvme:{folder}"
    if not folder.is_dir():
        return f"{name}: there is no such folder: make it, on a local disk (not over the network)"
    probe = folder / f".{PREFIX}probe-{os.getpid()}"
    try:
        handle = os.open(probe, os.O_CREAT | os.O_WRONLY | getattr(os, "O_DIRECT", 0), 0o600)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.write(handle, page)
        finally:
            os.close(handle)
    except OSError as error:
        why = error.strerror or str(error)
        return (
            f"{name}: it cannot be written past the system's cache ({why}): choose a folder on a local disk"
        )
    finally:
        probe.unlink(missing_ok=True)
    return None


def memory_needed(plan: Plan, needs: Needs) -> float:
    """Counts bytes of one process's memory: its gradients, buffers for its largest parameter, one piece of optimizer
    state with its parameters and gradients, a bucket of gradients, and gathered parameters."""
    mine, least = needs.largest / plan.shard, 4 * settings.LEAST_NUMBERS
    passing = (
        settings.BUFFERS * mine + 4 * max(mine, least) + max(needs.largest, least) + 2 * needs.unit(plan)
    )
    return needs.gradients / plan.shard + passing + LIBRARY_BYTES


class Scratch:
    """A temporary folder of this training inside the plan's folder; unused without offload to a disk."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._base = settings.nvme_folder(plan) if plan.offload.startswith(settings.NVME) else None
        self._world = world
        self._mine: Path | None = None

    def make(self, numbers: int, said: settings.Settings) -> None:
        """Makes the folder, and writes its path into DeepSpeed's settings. Collective.

        Raises:
            PlanError: the disk has too little room for a model of this size, or libaio is missing.
        """
        if self._base is None:
            return
        library.check_libaio(self._world)
        self._sweep()
        world = self._world.process
        needed = BYTES_EACH * numbers * world.local_size // world.size
        free = shutil.disk_usage(self._base).free
        if max(self._world.gather(needed - free)) > 0:
            raise PlanError(
                f"offload=nvme:{self._base} needs about {needed / 2**30:.1f} GiB on each node, and has "
                f"{free / 2**30:.1f} GiB: free some space, or choose another folder"
            )
        owner = self._world.share(f"{PREFIX}{socket.gethostname()}-{os.getpid()}")
        self._mine = self._base / owner / f"rank-{world.rank}"
        shutil.rmtree(self._mine, ignore_errors=True)  # of a training that failed in this process
        self._mine.mkdir(parents=True)
        for part in ("offload_optimizer", "offload_param"):
            said["zero_optimization"][part]["nvme_path"] = str(self._mine)

    def _sweep(self) -> None:
        """Removes the folders of killed trainings of this machine."""
        assert self._base is not None
        if self._world.process.local_rank == 0 and Path("/proc/self").exists():
            for left in self._base.glob(f"{PREFIX}{socket.gethostname()}-*"):
                number = left.name.rpartition("-")[2]
                if number.isdecimal() and not Path(f"/proc/{number}").exists():
                    shutil.rmtree(left, ignore_errors=True)
        self._world.barrier()

    def close(self) -> None:
        """Removes the folder."""
        if self._mine is not None:
            shutil.rmtree(self._mine, ignore_errors=True)
            try:
                self._mine.parent.rmdir()
            except OSError:
                return  # another process's part is still there
