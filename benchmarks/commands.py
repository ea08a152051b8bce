"""Commands: what a benchmark starts, alone or several at once, and a training of grappe's read from its curves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from grappe.training.run import Run

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
TORCHVISION = ROOT / ".bench/torchvision"
ATTEMPTS, ABORTED = 4, "terminate called without an active exception"


def paths(*folders: Path) -> str:
    """PYTHONPATH with further folders in front."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


def launched(size: int) -> list[str]:
    """Returns the command that starts Python on `size` processes of this machine, as users start it."""
    torchrun = str(Path(sys.executable).parent / "torchrun")
    return [torchrun, "--standalone", "--nproc-per-node", str(size)] if size > 1 else [sys.executable]


def of_page(script: str, torchvision: Path = TORCHVISION) -> tuple[list[str], dict[str, str]]:
    """Returns the command of a script of the page, and an environment in which the script finds torchvision."""
    world = Path(__file__).parent
    words = [sys.executable, str(world / "torchvision_on_cpu.py"), str(world / "scripts" / script)]
    return words, {"PYTHONPATH": paths(torchvision)}


def output(command: Sequence[str], folder: Path = ROOT, **environment: str) -> str:
    """The standard output of a command.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def together(command: Sequence[str], folder: Path, environments: Sequence[Mapping[str, str]]) -> list[str]:
    """Runs one process of a command for each environment; returns their outputs.

    Raises:
        RuntimeError: one of them failed; the others are ended.
    """
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in environments]
        processes = [
            subprocess.Popen(command, cwd=folder, env={**os.environ, **own}, stdout=log, stderr=log)
            for own, log in zip(environments, logs, strict=True)
        ]
        try:
            while None in (codes := [one.poll() for one in processes]) and not any(codes):
                time.sleep(0.01)
        finally:
            for one in processes:
                if one.poll() is None:
                    one.kill()
                one.wait()
        for log in logs:
            log.seek(0)
        said = [log.read() for log in logs]
    for code, words in zip(codes, said, strict=True):
        if code:
            raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{words}")
    return said


def again(begin: Callable[[], T]) -> T:
    """Returns the result of `begin`; tries again if torch ended a script with SIGABRT after its training.

    torch's gloo threads may outlive the interpreter (PyTorch's pull request 179291): about one start in ten of two
    processes. It says nothing of what was measured, and is told.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return begin()
        except RuntimeError as error:
            if ABORTED not in str(error):
                raise
            print("a script was aborted by torch as it left: once more", file=sys.stderr, flush=True)
    return begin()


def rounds(turns: Mapping[str, Callable[[str], T]], count: int, said: str, *, warm: bool = False) -> list[dict[str, T]]:
    """Returns the results of all turns in each round; every round begins with another contender.

    Args:
        turns: called with the round's number.
        said: what is measured, for who waits.
        warm: whether a round that is not counted comes first: what is compiled once, or read from the disk.
    """
    names, found = list(turns), []
    for number in range(-warm, count):
        first = number % len(names)
        turn = {name: again(functools.partial(turns[name], str(number))) for name in names[first:] + names[:first]}
        print(f"{said}, round {number + 1}: {turn}", file=sys.stderr, flush=True)
        found.append(turn)
    return found[warm:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A training of grappe's that has ended."""

    run: Run
    command: float
    """Seconds of the whole command."""

    @property
    def seconds(self) -> list[float]:
        """Of each step, what lies between it and the step before included; evaluation and saving are not."""
        return [record["seconds"] for record in self.run.records("step")]

    def rate(self, images: int, batch: int) -> float:
        """Images/s of its one epoch, from before the first batch is gathered to behind the last step."""
        steps = list(self.run.records("step"))
        assert len(steps) == -(-images // batch) and steps[-1]["samples"] == images, "not one whole epoch"
        assert sum(self.seconds) < self.command, "an epoch cannot take less time than it says"
        return images / sum(self.seconds)


def grappe(folder: Path, run: Path, task: str, *words: str) -> Trained:
    """`grappe train TASK --run RUN WORDS`, in a folder."""
    began = time.monotonic()
    output([sys.executable, "-m", "grappe", "train", task, *words, "--run", str(run)], folder)
    return Trained(run=Run(run), command=time.monotonic() - began)
