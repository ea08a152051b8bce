"""Functions for the processes of the launch tests: function(argument, process, rendezvous_folder)."""

import os
import signal
import time
from pathlib import Path

import torch

from grappe.errors import DataError
from grappe.launch.rank import ProcessRank


def answer(argument: object, process: ProcessRank, rendezvous_folder: Path) -> object:
    return argument, process.rank, process.size, rendezvous_folder.is_dir()


def large(argument: int, process: ProcessRank, rendezvous_folder: Path) -> bytes:
    return bytes(argument)


def tensors(argument: int, process: ProcessRank, rendezvous_folder: Path) -> list[torch.Tensor]:
    return [torch.arange(argument), torch.ones(argument)]


def variable(argument: str, process: ProcessRank, rendezvous_folder: Path) -> str | None:
    return os.environ.get(argument)


def refuse(argument: object, process: ProcessRank, rendezvous_folder: Path) -> None:
    if process.rank == 1:
        raise DataError("a file is missing")
    time.sleep(60)


def fail_in_torch(argument: object, process: ProcessRank, rendezvous_folder: Path) -> None:
    print(f"hello from {process.rank}")
    mark = rendezvous_folder / "failing"
    if process.rank == 1:
        mark.touch()
        torch.ones(2) @ torch.ones(3)
    while not mark.exists():
        time.sleep(0.01)
    time.sleep(1.0)
    raise ConnectionError("my peer has gone")  # what follows from it in the others


def die(number: int, process: ProcessRank, rendezvous_folder: Path) -> None:
    print(f"hello from {process.rank}", flush=True)
    if process.rank == 1:
        os.kill(os.getpid(), number)
    raise ConnectionError("my peer has gone")


def vanish(argument: object, process: ProcessRank, rendezvous_folder: Path) -> None:
    if process.rank == 0:
        os._exit(0)


def wait_for_a_signal(argument: object, process: ProcessRank, rendezvous_folder: Path) -> int:
    received = signal.sigwait({signal.SIGTERM, signal.SIGUSR1})
    return int(received)
