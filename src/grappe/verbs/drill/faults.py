"""Faults that a drill injects inside a training's processes: real signals, at chosen steps and random times."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

from grappe.checkpoint.format import list_checkpoints
from grappe.launch import files
from grappe.training.run import Run
from grappe.training.watchers.base import Record, RunInfo, Watcher

DISTURBED = "drill-disturbed.json"
RESUMED = "drill-resumed.json"
POLL_SECONDS = 0.0002
SPREAD = 2.0  # steps within which a process is killed


@dataclasses.dataclass
class FaultInjector(Watcher):
    """Watcher that injects a fault into its own process once `step` is done; every process gets a pickled copy."""

    fault: str
    step: int
    ranks: str = "all"
    """Ranks to fail: "all", "first" or "last"."""
    done: bool = False
    prompt = True

    def started(self, info: RunInfo) -> None:
        last = info.world_size - 1
        self._is_hurt = {"all": True, "first": info.rank == 0, "last": info.rank == last}[self.ranks]
        self._folder, self._rank = info.folder, info.rank

    def stepped(self, record: Record) -> None:
        if record.step < self.step or self.done:
            return
        self.done = True
        if self._rank == 0:
            write_record(self._folder / DISTURBED, {"step": record.step})
        if not self._is_hurt or self.fault == "save":
            return
        if self.fault == "disk":
            # For this process no file can grow any more: what a full disk is to it, without being root.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif self.fault == "SIGKILL":
            # Anywhere in what follows the step: each process at an instant of its own.
            threading.Timer(
                random.uniform(0, SPREAD * record.seconds), os.kill, (os.getpid(), signal.SIGKILL)
            ).start()
        else:
            os.kill(os.getpid(), getattr(signal, self.fault))

    def saving(self, step: int) -> None:
        if self.fault == "save" and self._is_hurt and step >= self.step:
            threading.Thread(target=self._kill_in_save, args=(step,), daemon=True).start()

    def _kill_in_save(self, step: int) -> None:
        while not any((self._folder / "checkpoints").glob(f".step-{step:06d}.*/rank-*")):
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass
class Stopwatch(Watcher):
    """Watcher that records the step at which a training began, and the time of its first step's end."""

    begun: int = 0
    written: bool = False
    prompt = True

    def started(self, info: RunInfo) -> None:
        self.begun, self._folder = info.start, info.folder
        self._is_main = info.rank == 0

    def stepped(self, record: Record) -> None:
        if self._is_main and not self.written:
            write_record(self._folder / RESUMED, {"from": self.begun, "time": time.time()})
            self.written = True


def write_record(file: Path, values: dict) -> None:
    """Writes a few numbers for the drill command."""
    files.replace(file, json.dumps(values).encode())


def largest_file(run: Path) -> Path:
    """Finds the largest file of the newest checkpoint."""
    newest = list_checkpoints(Run(run).checkpoints)[0].folder
    return max(newest.iterdir(), key=lambda file: file.stat().st_size)


def truncate(run: Path) -> None:
    """Cuts the newest checkpoint's largest file in half."""
    file = largest_file(run)
    os.truncate(file, file.stat().st_size // 2)


def flip(run: Path) -> None:
    """Flips one bit in the middle of the newest checkpoint's largest file."""
    file = largest_file(run)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
