"""Keeps a second process from writing a run: a lease file shows, on other nodes too, whether its holder is alive."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grappe.checkpoint.commit import read_json, write_json
from grappe.errors import RunError
from grappe.fields import from_json
from grappe.launch import files

FILE = "lease.json"
BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that writes a run."""

    token: str
    host: str
    pid: int
    job: str
    """The Slurm job that the process runs in; "" outside a job."""
    restart: int
    """The number of the job's start: of Slurm's restarts, or as the job's script counts them."""
    beat: float
    """Time of the last heartbeat, in seconds since 1970."""


class Lease:
    """Held from `take` to `release`, by process 0; its heartbeat is a thread.

    Raises:
        RunError: on `take`, a live process holds the lease.
    """

    def __init__(
        self, folder: Path, *, beat_seconds: float = BEAT_SECONDS, clock: Callable[[], float] = time.time
    ) -> None:
        self._file = folder / FILE
        self._beat_seconds, self._clock = beat_seconds, clock
        self.token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def held_by(self) -> str:
        """Names the living process that holds the lease; "": none."""
        holder, me = _holder(self._file), _myself()
        if holder is None or not abs(self._clock() - holder.beat) < STALE_SECONDS:
            return ""  # a beat from the future is no sign of life either, nor is NaN
        if holder.job and holder.job == me["job"] and holder.restart < me["restart"]:
            return ""  # a job is started again only when its processes are gone
        if holder.host == me["host"]:
            try:
                os.kill(holder.pid, 0)
            except (ProcessLookupError, OverflowError):
                return ""
            except PermissionError:
                pass  # it lives, and is somebody else's
        return f"process {holder.pid} on {holder.host}{f', job {holder.job}' if holder.job else ''}"

    def take(self) -> None:
        """Takes the lease, also from a holder that is dead or sent no heartbeat for a minute."""
        if who := self.held_by():
            raise RunError(
                f"{self._file.parent} is being written by {who}: "
                "stop that process first, or wait a minute if it is dead"
            )
        try:
            self._write()
        except OSError as error:
            raise RunError(
                f"{self._file.parent} cannot be written: {error.strerror}: free it, or train in another with --run"
            ) from error
        time.sleep(0.05)  # two processes may have found it free: the later write wins
        self.check()
        self._thread = threading.Thread(target=self._beat, name="grappe-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises RunError when another process has taken the lease."""
        holder = _holder(self._file)
        if holder is None or holder.token != self.token:
            who = "somebody removed the lease; another process"
            if holder is not None:
                who = f"process {holder.pid} on {holder.host}"
            raise RunError(f"{who} writes {self._file.parent} now: this process writes nothing more")

    def release(self) -> None:
        """Releases the lease."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        holder = _holder(self._file)
        if holder is not None and holder.token == self.token:
            with contextlib.suppress(OSError):  # it expires anyway; an error here would hide the one before
                files.remove(self._file)

    def _beat(self) -> None:
        while not self._stop.wait(self._beat_seconds):
            try:
                self.check()
                self._write()
            except (OSError, RunError):
                continue  # the next commit checks again, and reports it

    def _write(self) -> None:
        write_json(self._file, {**_myself(), "token": self.token, "beat": self._clock()})


def is_taken_over(folder: Path, token: str) -> bool:
    """Returns whether another start than the one of `token` holds the lease of the run in `folder`."""
    holder = _holder(folder / FILE)
    return holder is not None and holder.token != token


def _holder(file: Path) -> Holder | None:
    try:
        return from_json(Holder, read_json(file))
    except (RunError, ValueError):
        return None  # an incomplete lease blocks nobody


def _myself() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restart": int(os.environ.get("GRAPPE_START") or os.environ.get("SLURM_RESTART_COUNT") or 0),
    }
