"""Check of the run's folder: writing, renaming, speed, free space, quota, and the site's rules."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from grappe.checkpoint.commit import write_all
from grappe.errors import GrappeError
from grappe.launch import command, files
from grappe.verbs.doctor.checks import Finding, Machine, error, warning

BYTES = 16 << 20
SLOW = 20e6  # bytes a second, flushed to disk
LEAST_FREE = 2 << 30
LEAST_FILES = 1000


def check(machine: Machine) -> Iterator[Finding]:
    """Writes, flushes, renames and reads a file of 16 MiB, on the first process of each node."""
    if not machine.is_node_leader:
        return
    folder = machine.folder
    while not folder.exists():
        folder = folder.parent
    probe = folder / f".doctor-{secrets.token_hex(8)}"
    try:
        yield from of_speed(folder, speed(probe))
        usage, files = shutil.disk_usage(folder), os.statvfs(folder)
        yield from of_room(folder, usage.free, files.f_favail if files.f_files else None)
    except OSError as mistake:
        yield error(
            f"{folder} cannot be written: {mistake.strerror}",
            why="no checkpoint could be saved" + (": your quota is used up" if mistake.errno == 122 else ""),
            do="free some space (grappe prune), or write elsewhere with --run",
        )
    if machine.process.rank == 0:
        yield from quota()


def speed(probe: Path) -> float:
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


def of_speed(folder: Path, bytes_per_second: float) -> Iterator[Finding]:
    """Returns findings for a folder's speed in bytes per second."""
    if bytes_per_second < SLOW:
        yield warning(
            f"{folder} takes {bytes_per_second / 1e6:.1f} MB/s",
            why="every checkpoint waits for it",
            do="write runs to the site's scratch file system, or save less often (--save-every)",
        )


def of_room(folder: Path, free: int, files: int | None) -> Iterator[Finding]:
    """Returns findings for the free space."""
    if free < LEAST_FREE:
        yield warning(
            f"{folder} has {free / 1e9:.1f} GB left", why="checkpoints need room", do="grappe prune, or --run elsewhere"
        )
    if files is not None and files < LEAST_FILES:
        yield warning(
            f"{folder} has room for {files} more files", why="each checkpoint is several", do="remove small files"
        )


def quota() -> Iterator[Finding]:
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
