"""The DeepSpeed library: its requirements, a quiet start, the folder of offload=nvme:, a complete clean-up."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import logging
import mmap
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist
from torch.nn import functional

from grappe.contrib.deepspeed import settings
from grappe.engines.base import ModelMemory
from grappe.errors import PlanError, RunError
from grappe.launch import files
from grappe.launch.files import IN_PART
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.deepspeed import forget_previous_trainings

INSTALL = "engine=deepspeed needs the package deepspeed: pip install 'grappe[deepspeed]'"
LIBAIO = (
    "offload=nvme needs libaio, through which DeepSpeed reads and writes the disk, and a C++ compiler: "
    "apt-get install libaio-dev g++ (Debian, Ubuntu), dnf install libaio-devel gcc-c++ (Fedora, RHEL); "
    "on a cluster look for `module avail libaio`, and set CFLAGS and LDFLAGS to its -I and -L"
)

STALE_SECONDS = 300.0  # a compilation writes a file more often


def installed() -> bool:
    """Returns whether the package is installed."""
    return importlib.util.find_spec("deepspeed") is not None


def load(world: World) -> Any:
    """Imports the module, silenced, for the device of `world`. Called before any other function of this file."""
    # Chosen at its first import, by what it finds; a machine with a GPU may still train on its CPU.
    os.environ["DS_ACCELERATOR"] = world.device.type
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It would be compiled for a minute when communication starts, and serves inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    import cpuinfo

    # It needs seconds to describe the processor, and each of DeepSpeed's operators asks.
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    return deepspeed


class Communication:
    """DeepSpeed's communication over torch's process groups (made here for a single process), until `leave`."""

    def __init__(self, world: World) -> None:
        from deepspeed import comm

        self._alone = not dist.is_initialized()
        if self._alone:
            backend = "nccl" if world.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        # Which device is this process's: DeepSpeed looks there again and again.
        self._rank_before = os.environ.get("LOCAL_RANK")
        index = world.device.index if world.device.type == "cuda" else world.process.local_rank
        os.environ["LOCAL_RANK"] = str(index or 0)
        forget_previous_trainings()
        comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)

    def leave(self) -> None:
        """Forgets the process groups of this training: the next training in this process has others."""
        forget_previous_trainings()
        if self._rank_before is None:
            os.environ.pop("LOCAL_RANK", None)
        else:
            os.environ["LOCAL_RANK"] = self._rank_before
        if self._alone:
            dist.destroy_process_group()


@contextlib.contextmanager
def linear(zero3: bool) -> Iterator[None]:
    """Context with torch's linear function, or with ZeRO 3's, which keeps no gathered weight.

    DeepSpeed replaces torch's function for all models of the process, for ever, by one that sums in another order.
    """
    before = functional.linear
    if zero3:
        from deepspeed.runtime.zero.linear import zero3_linear_wrap

        functional.linear = zero3_linear_wrap
    try:
        yield
    finally:
        functional.linear = before


def forget_killed_builds(folder: Path) -> None:
    """Removes the locks of killed compilations: torch would wait for these locks for ever."""
    for lock in folder.glob("**/lock"):
        newest = max(file.stat().st_mtime for file in lock.parent.iterdir())
        if time.time() - newest > STALE_SECONDS:
            lock.unlink(missing_ok=True)


@functools.cache
def builds(builder: str) -> bool:
    """Returns whether one of DeepSpeed's operators ("CPUAdamBuilder") exists or can be compiled, and loads."""
    from deepspeed.accelerator import get_accelerator

    # A folder of compiled operators for each Python environment: two would recompile each other's.
    if "TORCH_EXTENSIONS_DIR" not in os.environ and os.access(sys.prefix, os.W_OK):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")
    forget_killed_builds(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/torch_extensions"))
    made = get_accelerator().create_op_builder(builder)
    try:
        if made is None or not made.is_compatible(verbose=False):
            return False
        made.load(verbose=False)
    except Exception:  # an error of a compiler, a linker or torch's loader: the operator is missing
        return False
    return True


def built_everywhere(builder: str, world: World) -> bool:
    """Builds the operator on every process; only the first process of each machine compiles it. Collective."""
    first = world.process.local_rank == 0
    is_built = builds(builder) if first else True
    world.barrier()
    is_built = is_built if first else builds(builder)
    return all(world.gather(is_built))


def check_libaio(world: World) -> None:
    """Raises PlanError if DeepSpeed cannot read and write a disk. Collective."""
    if not built_everywhere("AsyncIOBuilder", world):
        raise PlanError(LIBAIO)


BYTES_EACH = 20
"""For each number: the parameter, the optimizer's copy of it, Adam's two moments, and the gradient temporarily."""
PREFIX = "grappe-"
OWNER = "owner"
"""The file that a living training keeps locked in its folder."""
TO_BE_NAMED = "offload=nvme:FOLDER"
LIBRARY_BYTES = 180_000_000
"""Bytes of DeepSpeed, its operators and its threads' stacks, as RLIMIT_DATA counts them: 183 MB when measured."""


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
        check_libaio(self._world)
        world = self._world.process
        for left in self._base.glob(f"{PREFIX}*") if world.local_rank == 0 else ():
            if _is_left(left):
                files.remove_tree(left)
        self._world.barrier()
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
    """Returns whether a training of this user made a folder, and was killed: its lock is free."""
    try:
        with files.reader(folder / OWNER, IN_PART) as stream:
            if os.fstat(stream.fileno()).st_uid != os.getuid():
                return False
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, RunError):  # not a folder of grappe's, or its training is alive
        return False
    return True
