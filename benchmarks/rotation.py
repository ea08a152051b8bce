"""Rotation: all contenders' processes live at once, and one contender after the other takes a block of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.pacer import Block, Pacer, Seat

START_SECONDS = 180
BLOCK_SECONDS = 120
LAST_LINES = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """Length of a contender's turn."""

    rounds: int
    warmup: int
    block: int


class Contender:
    """One loop, in as many processes as it trains on, waiting for its turn."""

    def __init__(self, module: str, size: int, pace: Pace, folder: Path, device: str) -> None:
        self.module = module
        self._folder = folder
        folder.mkdir()
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._members: list[tuple[Any, Connection]] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            seat = Seat(rank=rank, size=size, folder=folder, device=device)
            process = context.Process(target=_sit, args=(module, seat, pace, theirs, port), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def ready(self) -> None:
        """Waits until each of its processes has taken a step."""
        self._heard(START_SECONDS)

    def turn(self) -> list[Block]:
        """Takes a block of steps; what it took in each process."""
        for _, pipe in self._members:
            pipe.send("go")
        return self._heard(BLOCK_SECONDS)

    def _heard(self, seconds: float) -> list[Any]:
        answers = []
        for _, pipe in self._members:
            if not pipe.poll(seconds):
                raise RuntimeError(f"{self.module} is silent for {seconds} s{self._last_lines()}")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"{self.module} died{self._last_lines()}") from None
        return answers

    def _last_lines(self) -> str:
        logs = sorted(self._folder.rglob("*.log"))
        return "".join(
            f"\n{log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]) for log in logs
        )

    def close(self) -> None:
        """Ends its processes."""
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join()


def rotate(
    modules: Sequence[str], size: int, pace: Pace, folder: Path, device: str = "cpu"
) -> dict[int, list[list[Block]]]:
    """By place in `modules` ("NAME", or "NAME:ARGUMENT"), a list of rounds: the blocks of a round's processes.

    Each round lets every contender take its turn, beginning with another one each time. What a contender
    writes goes below `folder`, under its place.
    """
    blocks: dict[int, list[list[Block]]] = {place: [] for place in range(len(modules))}
    with _seated(modules, size, pace, folder, device) as contenders:
        for number in range(pace.rounds):
            for turn in range(len(modules)):
                place = (number + turn) % len(modules)
                blocks[place].append(contenders[place].turn())
    return blocks


@contextlib.contextmanager
def _seated(modules: Sequence[str], size: int, pace: Pace, folder: Path, device: str) -> Iterator[list[Contender]]:
    contenders: list[Contender] = []
    try:
        for place, module in enumerate(modules):
            contenders.append(Contender(module, size, pace, folder / str(place), device))
            contenders[-1].ready()
        yield contenders
    finally:
        for contender in contenders:
            contender.close()


def _sit(module: str, seat: Seat, pace: Pace, pipe: Connection, port: int) -> None:
    """The body of a contender's process."""
    log = os.open(seat.folder / f"rank-{seat.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    environment(seat, port)
    import torch

    torch.set_num_threads(1)
    wait = {"wait": torch.cuda.synchronize} if seat.device == "cuda" else {}
    pacer = Pacer(pipe, pace.warmup, pace.block, **wait)
    try:
        name, *further = module.split(":")
        importlib.import_module(f"benchmarks.contenders.{name}").run(seat, pacer, *further)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise


def environment(seat: Seat, port: int) -> None:
    """Returns the variables that torchrun sets, and the loopback interface, which grappe chooses on one machine."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    if seat.size > 1:
        os.environ.update(
            RANK=str(seat.rank),
            LOCAL_RANK=str(seat.rank),
            WORLD_SIZE=str(seat.size),
            LOCAL_WORLD_SIZE=str(seat.size),
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="benchmark",
        )


def free_port() -> int:
    """A port that is free now; the rivals take no other way to meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def installed(module: str) -> bool:
    """Whether what a contender needs is in this environment."""
    needs = {"fabric": "lightning", "trainer": "lightning", "accelerate": "accelerate"}
    return module not in needs or importlib.util.find_spec(needs[module]) is not None
