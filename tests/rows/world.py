"""Forked processes of a world, whose collectives this process relays: one that waits for another in vain is told so.

torch's backends would hang, or mix up two messages, where a wrong rule sends a process astray.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from grappe.rows import exchange
from grappe.rows.context import NOW

SECONDS = 60
"""Of processor time for one piece of work; a process that takes longer hangs, and ends."""


class OutOfStep(Exception):
    """Processes are in different collectives, or one has ended while another waits for it."""


class Died(Exception):
    """A process ended in the middle of its work."""


class World:
    """`size` processes, forked from this one, that each call work(rank, piece) for a piece of work."""

    def __init__(self, size: int, make: Callable[[int], Callable[[Any], Any]]) -> None:
        self.size, self._make = size, make
        self._members: list[tuple[int, Connection]] = []

    def run(self, piece: Any) -> list[Any]:
        """Returns what each process makes of a piece. Raises Died, after which processes are new."""
        if not self._members:
            self._members = [self._fork(rank) for rank in range(self.size)]
        pipes = [pipe for _, pipe in self._members]
        try:
            for pipe in pipes:
                pipe.send_bytes(pickle.dumps(piece))
            return self._relay(pipes)
        except (EOFError, ConnectionError):
            raise Died(self._end()) from None

    def close(self) -> None:
        """Ends the processes."""
        self._end()

    def _relay(self, pipes: list[Connection]) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.size:
            calls: dict[int, Any] = {}
            for rank, pipe in enumerate(pipes):
                if rank not in results:
                    kind, *rest = pickle.loads(pipe.recv_bytes())
                    if kind == "end":
                        results[rank] = rest[0]
                    else:
                        calls[rank] = rest
            if not calls:
                break
            alike = len(calls) == self.size and len({kind for kind, _ in calls.values()}) == 1
            if alike:
                answer: Any = [payload for _, payload in calls.values()]
            else:
                answer = "; ".join(
                    f"process {rank} {f'is in {calls[rank][0]}' if rank in calls else 'has ended'}"
                    for rank in range(self.size)
                )
            content = pickle.dumps(answer)
            for rank in calls:
                pipes[rank].send_bytes(content)
        return [results[rank] for rank in range(self.size)]

    def _fork(self, rank: int) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        child = os.fork()
        if child:
            theirs.close()
            return child, ours
        try:
            for _, pipe in self._members:
                pipe.close()
            ours.close()
            _serve(self._make(rank), theirs)
        except (EOFError, ConnectionError):
            pass
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)

    def _end(self) -> str:
        """Ends the processes, and says how those did that had ended."""
        hows = []
        for child, pipe in self._members:
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            elif os.WIFSIGNALED(status):
                hows.append(signal.Signals(os.WTERMSIG(status)).name)
            pipe.close()
        self._members.clear()
        return ", ".join(hows) or "ended"


def _serve(work: Callable[[Any], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    collectives = _collectives(pipe)
    with mock.patch.multiple(dist, **collectives), mock.patch.object(exchange, "send", _exchanging(collectives)):
        while True:
            piece = pickle.loads(pipe.recv_bytes())
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
            made = work(piece)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            pipe.send_bytes(pickle.dumps(("end", made)))


def _collectives(pipe: Connection) -> dict[str, Any]:
    """torch.distributed's functions, over the pipe to the process that relays."""

    def meet(kind: str, payload: Any) -> list[Any]:
        pipe.send_bytes(pickle.dumps(("collective", kind, payload)))
        answer = pickle.loads(pipe.recv_bytes())
        if isinstance(answer, str):
            raise OutOfStep(answer)
        return answer

    def tensors(kind: str, tensor: Tensor) -> list[Tensor]:
        assert type(tensor) is Tensor and tensor.is_contiguous(), "torch.distributed takes contiguous tensors"
        sent = tensor.detach().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        answers = meet(f"{kind} {tuple(tensor.shape)} {tensor.dtype}", sent)
        return [
            torch.frombuffer(bytearray(each), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
            if each
            else torch.empty_like(tensor)
            for each in answers
        ]

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        name = next(name for name in _REDUCE if op == getattr(dist.ReduceOp, name))
        first, *rest = tensors(f"all_reduce {name}", tensor)
        for each in rest:
            first = _REDUCE[name](first, each)
        tensor.copy_(first)
        return _Done() if async_op else None

    def all_gather(parts: Any, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        for part, got in zip(parts, tensors("all_gather", tensor), strict=True):
            part.copy_(got)
        return _Done() if async_op else None

    def all_gather_into_tensor(out: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        out.view(-1).copy_(torch.stack(tensors("all_gather_into_tensor", tensor)).view(-1))
        return _Done() if async_op else None

    def broadcast(tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Any:
        tensor.copy_(tensors(f"broadcast from {src}", tensor)[src])
        return _Done() if async_op else None

    def all_gather_object(objects: list[Any], value: Any, group: Any = None) -> None:
        objects[:] = meet("all_gather_object", value)

    made = (all_reduce, all_gather, all_gather_into_tensor, broadcast, all_gather_object)
    return {each.__name__: each for each in made}


def _exchanging(collectives: dict[str, Any]) -> Callable[..., None]:
    def send(to: dict[int, Tensor], arriving: dict[int, Tensor], purpose: str) -> None:
        sent: list[Any] = [None] * NOW.context.size
        own = {rank: each.detach().contiguous().clone() for rank, each in to.items()}
        collectives["all_gather_object"](sent, own)
        for rank, each in arriving.items():
            each.copy_(sent[rank][NOW.context.rank])

    return send


class _Done:
    """A collective that has ended."""

    def wait(self) -> None:
        pass


_REDUCE: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
}
