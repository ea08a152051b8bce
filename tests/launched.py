"""What the processes of tests/test_launch.py do: function(argument, place, meet)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from grappe.errors import DataError
from grappe.place import Place


def answer(argument: object, place: Place, meet: Path) -> object:
    return argument, place.rank, place.size, meet.is_dir()


def large(argument: int, place: Place, meet: Path) -> bytes:
    return bytes(argument)


def tensors(argument: int, place: Place, meet: Path) -> list[torch.Tensor]:
    return [torch.arange(argument), torch.ones(argument)]


def variable(argument: str, place: Place, meet: Path) -> str | None:
    return os.environ.get(argument)


def refuse(argument: object, place: Place, meet: Path) -> None:
    if place.rank == 1:
        raise DataError("a file is missing")
    time.sleep(60)


def fail_in_torch(argument: object, place: Place, meet: Path) -> None:
    print(f"hello from {place.rank}")
    if place.rank == 1:
        torch.ones(2) @ torch.ones(3)
    time.sleep(0.2)
    raise ConnectionError("my peer has gone")  # what follows from it in the others


def die(number: int, place: Place, meet: Path) -> None:
    print(f"hello from {place.rank}", flush=True)
    if place.rank == 1:
        os.kill(os.getpid(), number)
    raise ConnectionError("my peer has gone")


def vanish(argument: object, place: Place, meet: Path) -> None:
    if place.rank == 0:
        os._exit(0)


def task_fields(task: object, place: Place, meet: Path) -> dict:
    from grappe.task import fields

    return fields(task)


def wait_for_a_signal(argument: object, place: Place, meet: Path) -> int:
    received = signal.sigwait({signal.SIGTERM, signal.SIGUSR1})
    return int(received)
