"""Checks of a node: its cores, memory, network, and the run's folder: writing, speed, free space, quota."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from grappe.checkpoint.commit import write_all
from grappe.contrib.doctor.checks import Finding, Machine, error, note, of_level, once_a_node, warning
from grappe.errors import GrappeError
from grappe.launch import command, files
from grappe.launch.world import cores, own_cores
from grappe.profiling import memory
from grappe.words import count_of

SHARED = Path("/dev/shm")
LEAST_SHARED = 1 << 30
LEAST_PER_PROCESS = 2 << 30

BYTES = 16 << 20
SLOW = 20e6  # bytes a second, flushed to disk
LEAST_FREE = 2 << 30
LEAST_FILES = 1000

INTERFACES = Path("/sys/class/net")
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
UNREAD = {"TORCH_NCCL_ASYNC_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
"""Variables of cluster pages that nothing reads, and the ones that torch reads."""


def check_cores(machine: Machine) -> Iterator[Finding]:
    """Checks for too many threads, which compete for cores, and for too few, which leave cores idle."""
    plan, process = machine.plan, machine.process
    usable, own = cores(), own_cores(process)
    yield from of_cores(usable, own, plan.threads or own, plan.workers or 0, requested=process.cores)
    limit = machine.environment.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit) > own:
        yield warning(
            f"OMP_NUM_THREADS={limit}, and each process has {count_of(own, 'core')}",
            why="threads that wait for each other's cores made training 40 times slower here",
            do=f"unset it, or set it to {own}",
        )


def of_cores(usable: int, own: int, threads: int, workers: int, requested: int | None) -> Iterator[Finding]:
    """Returns findings for a process that may use `usable` cores, `own` of them alone."""
    if threads > own:
        yield warning(
            f"threads={threads}, and each process has {count_of(own, 'core')}",
            why="threads that wait for each other's cores made training 40 times slower here",
            do=f"use threads={own}, or ask for more cores",
        )
    elif workers > own:
        yield warning(
            f"workers={workers} for each process, which has {count_of(own, 'core')}",
            why="loading competes with training for cores",
            do=f"use workers={max(0, own - 1)}, or ask for more cores",
        )
    if requested is not None and usable < requested:
        yield warning(
            f"the job asked for {requested} cores a process, and this one may use {usable}",
            why="srun of Slurm 22.05 to 23.02 does not take --cpus-per-task from the job",
            do="start with srun --cpus-per-task=$SLURM_CPUS_PER_TASK, as grappe submit does",
        )


@once_a_node
def check_host_memory(machine: Machine) -> Iterator[Finding]:
    """Checks shared memory and the control group's limit."""
    group, process = memory.control_group(), machine.process
    shared = shutil.disk_usage(SHARED).free if SHARED.is_dir() else None
    yield from of_memory(shared, machine.plan.workers, group.size if group else None, process.local_size)


def of_memory(free: int | None, workers: int | None, bytes_: int | None, processes: int) -> Iterator[Finding]:
    """Returns findings for a node's memory.

    Args:
        free: bytes of shared memory, through which data workers pass batches.
        bytes_: that all `processes` may have; torch alone takes about half a gigabyte each, with CUDA two.
    """
    if free is not None and workers != 0 and free < LEAST_SHARED:
        yield warning(
            f"{free / 1e9:.1f} GB of shared memory ({SHARED}) are free",
            why="data workers pass batches through it, and die with a bus error when it is full",
            do="give the container more (--shm-size, --ipc=host), or use workers=0",
        )
    if bytes_ is not None and bytes_ < processes * LEAST_PER_PROCESS:
        yield warning(
            f"{processes} processes may use {bytes_ / 1e9:.1f} GB of memory on this node",
            why="torch with CUDA alone takes about 2 GB a process; the job is killed at the limit",
            do="ask for more memory (--mem), or for fewer processes on a node",
        )


@once_a_node
def check_run_folder(machine: Machine) -> Iterator[Finding]:
    """Writes, flushes, renames and reads a file of 16 MiB."""
    folder = machine.folder
    while not folder.exists():
        folder = folder.parent
    try:
        speed = writing_speed(folder / f".doctor-{secrets.token_hex(8)}")
        usage, entries = shutil.disk_usage(folder), os.statvfs(folder)
        yield from of_folder(folder, speed, usage.free, entries.f_favail if entries.f_files else None)
    except OSError as mistake:
        yield error(
            f"{folder} cannot be written: {mistake.strerror}",
            why="no checkpoint could be saved" + (": your quota is used up" if mistake.errno == 122 else ""),
            do="free some space (grappe prune), or write elsewhere with --run",
        )
    if machine.process.rank == 0:
        yield from of_quota()


def writing_speed(probe: Path) -> float:
    """Measures the bytes per second to write and flush a file; raises OSError if it cannot be renamed atomically."""
    renamed = probe.with_name(f"{probe.name}-renamed")
    try:
        began = time.perf_counter()
        with files.new_file(probe) as stream:
            write_all(stream.fileno(), os.urandom(BYTES))
            os.fsync(stream.fileno())
        took = time.perf_counter() - began
        files.new_file(renamed).close()
        files.rename(probe, renamed)  # over an existing file, as a commit does
        if renamed.stat().st_size != BYTES:
            raise OSError(5, "a renamed file has not its content")
        return BYTES / took
    finally:
        for file in (probe, renamed):
            files.remove(file)


def of_folder(folder: Path, bytes_per_second: float, free: int, files: int | None) -> Iterator[Finding]:
    """Returns findings for a folder's speed in bytes per second, its free bytes, and the files it may still hold."""
    if bytes_per_second < SLOW:
        yield warning(
            f"{folder} takes {bytes_per_second / 1e6:.1f} MB/s",
            why="every checkpoint waits for it",
            do="write runs to the site's scratch file system, or save less often (--save-every)",
        )
    if free < LEAST_FREE:
        yield warning(
            f"{folder} has {free / 1e9:.1f} GB left", why="checkpoints need room", do="grappe prune, or --run elsewhere"
        )
    if files is not None and files < LEAST_FILES:
        yield warning(
            f"{folder} has room for {files} more files", why="each checkpoint is several", do="remove small files"
        )


def of_quota() -> Iterator[Finding]:
    """Runs `quota`, if it is installed: a line with a star is over its limit."""
    try:
        text = command.run("quota", "-w", seconds=5)
    except GrappeError as mistake:
        text = str(mistake)  # it fails when a limit is passed, and says which
    for line in text.splitlines():
        if "*" in line and line.split()[0].startswith("/"):
            yield error(
                f"a disk quota is used up: {' '.join(line.split())}", why="nothing can be saved", do="free some space"
            )


@once_a_node
def check_network(machine: Machine) -> Iterator[Finding]:
    """Checks the host's name, interfaces that variables name, and InfiniBand that is switched off."""
    several = machine.process.size > machine.process.local_size
    try:
        address = socket.gethostbyname(socket.gethostname())
        if several and address.startswith("127."):
            yield warning(
                f"this node's name {socket.gethostname()} resolves to {address}",
                why="processes on other nodes cannot reach it there",
                do="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network's interface (ip addr)",
            )
    except OSError:
        yield of_level(
            "error" if several else "note",
            f"this node's name {socket.gethostname()} does not resolve",
            why="processes on several nodes find each other by host name",
            do="tell the site",
        )
    for unread, meant in UNREAD.items():
        if unread in machine.environment:
            yield note(f"torch reads no {unread}", why="it does nothing", do=f"unset it: it means {meant}, which is on")
    interfaces = [entry.name for entry in INTERFACES.iterdir()] if INTERFACES.is_dir() else []
    yield from of_interfaces(machine.environment, interfaces)
    if several and list(Path("/sys/class/infiniband").glob("*")) and machine.environment.get("NCCL_IB_DISABLE") == "1":
        yield warning(
            "NCCL_IB_DISABLE=1 where there is InfiniBand", why="gradients take a slower network", do="unset it"
        )


def of_interfaces(environment: Mapping[str, str], existing: Collection[str]) -> Iterator[Finding]:
    """Returns findings for variables that name a missing interface, which makes every start fail."""
    for variable in VARIABLES:
        text = environment.get(variable, "")
        names = tuple(name.partition(":")[0] for name in text.lstrip("^=").split(",") if name)
        missing = bool(names and existing) and not any(name.startswith(names) for name in existing)
        if missing and not text.startswith("^"):
            yield error(
                f"{variable}={text}, and this node has {', '.join(sorted(existing))}",
                why="no process will find the others",
                do=f"unset {variable}",
            )
