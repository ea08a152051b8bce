"""Processes of a world as threads that take turns: they change only at collectives, so that every run is the same.

A process that meets no partner for its collective, or another one than the others', gets `OutOfStep` instead of hanging.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from grappe.rows.context import RowsContext, activate


_thread = threading.local()
"""Its `process` is the one whose thread it is."""


class OutOfStep(Exception):
    """Processes are in different collectives, or one has ended while another waits for it."""


class _Process:
    """A thread that runs what it is handed, one at a time, and pauses at each collective."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self.function: Callable[[], Any] | None = None
        self.context: RowsContext | None = None
        self.random_state: Tensor | None = None
        self.ended = True
        self.outcome: Any = None
        self.collective: tuple[Any, ...] | None = None
        self.answer: Any = None
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        _thread.process = self
        while True:
            self._go.acquire()
            if self.function is None:
                return
            try:
                self.outcome = self.function(), None
            except BaseException as error:
                self.outcome = None, error
            self.ended = True
            self.function = None
            self._paused.release()

    def step(self) -> None:
        """Lets it run to its next collective or its end, with its own context and state of random numbers."""
        torch.set_rng_state(self.random_state)
        with activate(self.context):
            self._go.release()
            self._paused.acquire()
        self.random_state = torch.get_rng_state()

    def meet(self, collective: tuple[Any, ...]) -> Any:
        """Called in its thread: waits until every process is here, and returns what the collective makes."""
        self.collective = collective
        self._paused.release()
        self._go.acquire()
        self.collective = None
        if isinstance(self.answer, OutOfStep):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.function = None
        self._go.release()


class Lockstep:
    """A world of `size` processes. `run` lets each run a function of its rank, from one state of random numbers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes = [_Process(rank) for rank in range(size)]
        self._stack = contextlib.ExitStack()

    def run(self, function: Callable[[int], Any], *, script_folder: str = "") -> list[tuple[Any, Any, RowsContext]]:
        """Returns for each process its result, its error (or None) and its context."""
        state = torch.get_rng_state()
        for process in self._processes:
            process.context = RowsContext(rank=process.rank, size=self.size, script_folder=script_folder)
            process.random_state = state
            process.function = lambda rank=process.rank: function(rank)
            process.ended = False
        while True:
            for process in self._processes:
                if not process.ended:
                    process.step()
            waiting = [process for process in self._processes if not process.ended]
            if not waiting:
                break
            self._answer(waiting)
        return [(*process.outcome, process.context) for process in self._processes]

    def random_states(self) -> list[Tensor]:
        """The state of random numbers of each process after the last run."""
        return [process.random_state for process in self._processes]

    def __enter__(self) -> Lockstep:
        self._stack.enter_context(self._collectives())
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the threads."""
        self._stack.close()
        for process in self._processes:
            process.close()

    def _answer(self, waiting: list[_Process]) -> None:
        calls = [process.collective for process in waiting]
        kinds = {call[:-1] for call in calls}
        if len(waiting) < self.size or len(kinds) > 1:
            names = ", ".join(f"process {p.rank}: {p.collective[:-1]}" for p in waiting)
            for process in waiting:
                process.answer = OutOfStep(f"{names}; the others: ended")
            return
        kind = calls[0]
        tensors = [call[-1] for call in calls]
        if kind[0] == "reduce":
            total = tensors[0].clone()
            for each in tensors[1:]:
                total = REDUCE[kind[1]](total, each)
            answer: Any = total
        else:
            answer = [each.clone() for each in tensors]
        for process in waiting:
            process.answer = answer

    @contextlib.contextmanager
    def _collectives(self) -> Iterator[None]:
        def signature(tensor: Tensor) -> tuple[Any, ...]:
            assert type(tensor) is Tensor and tensor.is_contiguous()
            return tuple(tensor.shape), tensor.dtype

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            name = next(name for name in REDUCE if op == getattr(dist.ReduceOp, name))
            tensor.copy_(_thread.process.meet(("reduce", name, *signature(tensor), tensor)))
            return _Done() if async_op else None

        def all_gather(parts: Any, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
            for part, got in zip(parts, _thread.process.meet(("gather", "", *signature(tensor), tensor)), strict=True):
                part.copy_(got)
            return _Done() if async_op else None

        def all_gather_into_tensor(out: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
            got = torch.stack(_thread.process.meet(("gather", "", *signature(tensor), tensor)))
            assert out.is_contiguous()
            out.view(-1).copy_(got.view(-1))
            return _Done() if async_op else None

        def broadcast(tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Any:
            tensor.copy_(_thread.process.meet(("gather", f"from {src}", *signature(tensor), tensor))[src])
            return _Done() if async_op else None

        with mock.patch.multiple(
            dist,
            all_reduce=all_reduce,
            all_gather=all_gather,
            all_gather_into_tensor=all_gather_into_tensor,
            broadcast=broadcast,
        ):
            yield


class _Done:
    """A collective that has ended."""

    def wait(self) -> None:
        pass


REDUCE: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
}
