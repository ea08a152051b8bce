"""The folder of offload=nvme: is checked, and holds a temporary folder for each training."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from grappe.engines.base import ModelMemory
from grappe.engines.deepspeed import library, settings
from grappe.errors import PlanError, RunError
from grappe.launch import files
from grappe.launch.files import IN_PART
from grappe.launch.world import World
from grappe.plan import Plan

BYTES_EACH = 20
"""For each number: the parameter, the optimizer's copy of it, Adam's two moments, and the gradient temporarily."""
PREFIX = "grappe-"
OWNER = "owner"
"""The file that a living training keeps locked in its folder."""
TO_BE_NAMED = "offload=nvme:FOLDER"
LIBRARY_BYTES = 180_000_000
"""What DeepSpeed itself, its operators and its threads' stacks take, as RLIMIT_DATA counts it: 183 MB when measured."""


def problem(folder: Path) -> str | None:
    """Returns the reason why DeepSpeed cannot use `folder`; None: no reason."""
    name = f"offload=nvme:{folder}"
    if not folder.is_dir():
        return f"{name}: there is no such folder: make it, on a local disk (not over the network)"
    probe = folder / f".{PREFIX}probe-{secrets.token_hex(8)}"
    made = False
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_DIRECT", 0)
        handle, made = os.open(probe, flags, 0o600), True
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.write(handle, page)
        finally:
            os.close(handle)
    except OSError as error:
        why = error.strerror or str(error)
        return f"{name}: it cannot be written past the system's cache ({why}): choose a folder on a local disk"
    finally:
        if made:
            files.remove(probe)
    return None


def memory_needed(plan: Plan, needs: ModelMemory) -> float:
    """Counts bytes of one process's memory: its gradients, buffers for its largest parameter, one piece of optimizer
    state with its parameters and gradients, a bucket of gradients, and gathered parameters."""
    share, least = needs.largest / plan.shard, 4 * settings.LEAST_NUMBERS
    passing = settings.BUFFERS * share + 4 * max(share, least) + max(needs.largest, least) + 2 * needs.unit(plan)
    return needs.gradients / plan.shard + passing + LIBRARY_BYTES


class Scratch:
    """A temporary folder of this training inside the plan's folder; unused without offload to a disk."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._base = settings.nvme_folder(plan) if plan.offload.startswith(settings.NVME) else None
        self._world = world
        self._folder: Path | None = None
        self._owner: BinaryIO | None = None

    def make(self, numbers: int, config: settings.Settings) -> None:
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
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._base))
        self._owner = _owned(self._folder)
        for part in ("offload_optimizer", "offload_param"):
            config["zero_optimization"][part]["nvme_path"] = str(self._folder)

    def _sweep(self) -> None:
        """Removes the folders of this user's killed trainings: those whose lock is free."""
        assert self._base is not None
        if self._world.process.local_rank == 0:
            for left in self._base.glob(f"{PREFIX}*"):
                if _is_left(left):
                    files.remove_tree(left)
        self._world.barrier()

    def close(self) -> None:
        """Removes the folder."""
        if self._folder is not None:
            files.remove_tree(self._folder)
        if self._owner is not None:
            self._owner.close()


def _owned(folder: Path) -> BinaryIO:
    """Marks a folder as this process's own for as long as the process lives: the system unlocks a dead one's file."""
    stream = files.new_file(folder / f".{OWNER}", IN_PART)
    fcntl.flock(stream, fcntl.LOCK_EX)
    files.rename(folder / f".{OWNER}", folder / OWNER, IN_PART)  # from now on it is locked, or left
    return stream


def _is_left(folder: Path) -> bool:
    """Returns whether a training of this user made a folder, and has ended."""
    try:
        with files.reader(folder / OWNER, IN_PART) as stream:
            if os.fstat(stream.fileno()).st_uid != os.getuid():
                return False
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, RunError):  # not a folder of grappe's, or its training is alive
        return False
    return True
