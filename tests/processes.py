"""A pool of processes that tests share: started once, given functions to run as the processes of a world."""

import contextlib
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from grappe.launch import local
from grappe.launch.rank import ProcessRank
from tests import needs
from tests.patience import PATIENCE_SECONDS

MOST_THREADS = 0 if version("torch").startswith(("2.8", "2.9")) else 100
"""Of a process before the pool starts new ones: caches of torch's may keep process groups, whose threads poll forever.
Older releases of torch find those groups again, destroyed, for an equal mesh: new processes each time."""

PRELOADED = (
    "grappe.engines.native_pipeline", "grappe.contrib.lightning.fit", "horovod.torch", "deepspeed",
    "torch._inductor.compile_fx", "tests.parity.cell", "tests.faults.resume_cell",
)  # fmt: skip
"""What engines and most cells import in seconds, and each new process of the pool again."""

SHOW_STACKS = signal.SIGRTMIN
"""The signal on which a process of the pool, and a process that it forked, writes the stacks of its Python threads."""
STACKS_SECONDS = 5.0  # for writing them


class Pool:
    """Processes that wait for functions ("package.module:name"), called as function(place, meet, *arguments)."""

    def __init__(self, size: int) -> None:
        local.OF_TASKS = (*local.OF_TASKS, *PRELOADED)
        local.start_server()  # the server is one for all of this process: it must be the one that launching needs
        self._context = multiprocessing.get_context("forkserver")
        self._rendezvous_folder = Path(tempfile.mkdtemp(prefix="grappe-test-"))
        self._stacks_folder = Path(tempfile.mkdtemp(prefix="grappe-stacks-"))
        self._calls = itertools.count()
        self._size = size
        self._members: list[tuple[Any, Connection]] = []
        self._start(size)

    def _start(self, count: int) -> None:
        for _ in range(count):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self._stacks_folder), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def run(self, function: str, size: int, *arguments: Any) -> list[Any]:
        """Returns the result of each of `size` processes. Raises AssertionError with the first traceback.

        The test is skipped where a plan among the arguments needs what this machine lacks.
        """
        for text in arguments:
            if isinstance(text, str):
                needs.need(text)
        self._start(size - len(self._members))  # the few tests that need more than all others share
        job = f"call{next(self._calls)}"
        members = self._members[:size]
        for rank, (_, pipe) in enumerate(members):
            process = ProcessRank(rank=rank, size=size, local_rank=rank, local_size=size, job=job)
            pipe.send(cloudpickle.dumps((function, process, self._rendezvous_folder, arguments)))
        answers: list[Any] = [None] * size
        missing = {pipe: rank for rank, (_, pipe) in enumerate(members)}
        while missing:
            ready = wait(list(missing), PATIENCE_SECONDS)
            if not ready:
                stacks = self._stacks()
                self._restart()
                raise AssertionError(f"{function}: processes {sorted(missing.values())} hang\n{stacks}")
            for pipe in ready:
                rank = missing.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "it died"
                if not ok:
                    self._restart()
                    raise AssertionError(f"process {rank} of {size}: {value}")
                answers[rank] = cloudpickle.loads(value)
        if _threads(members[0][0].pid) > MOST_THREADS:
            self._restart()
        return answers

    def _restart(self) -> None:
        self._kill()
        self._start(self._size)

    def _kill(self) -> None:
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members.clear()

    def close(self) -> None:
        """Ends the processes."""
        self._kill()
        shutil.rmtree(self._rendezvous_folder, ignore_errors=True)
        shutil.rmtree(self._stacks_folder, ignore_errors=True)

    def _stacks(self) -> str:
        """Returns the stacks of all members, and of the processes that they forked."""
        for process, _ in self._members:
            for pid in (process.pid, *_children(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SHOW_STACKS)
        time.sleep(STACKS_SECONDS)
        files = sorted(self._stacks_folder.iterdir())
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files if file.stat().st_size)


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def _serve(pipe: Connection, stacks: Path) -> None:
    import torch

    # What it forks writes into the same file.
    faulthandler.register(SHOW_STACKS, file=(stacks / f"process-{os.getpid()}").open("w"), all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # the libraries' objects: what comes after is collected in milliseconds
    kept = 0
    while True:
        # A mesh that nobody has any more keeps process groups, whose threads poll.
        if _threads(os.getpid()) > kept:
            gc.collect()
            kept = _threads(os.getpid())
        function, process, rendezvous_folder, arguments = cloudpickle.loads(pipe.recv())
        try:
            module, _, name = function.partition(":")
            value = getattr(importlib.import_module(module), name)(process, rendezvous_folder, *arguments)
            pipe.send((True, cloudpickle.dumps(value)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
