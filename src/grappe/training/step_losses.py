"""Sums the losses of a script's steps over the processes: each backward's, by the script's line.

For a script whose backwards are its own, unedited or around a grappe.Loop. The sums are made while the next step runs.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from grappe.errors.user_line import is_users_file
from grappe.launch.world import World


class StepLosses:
    """Losses of a step's backwards, of which each process has its term.

    Args:
        group: of the processes, for tensors on the CPU and on the device; None: there is one process.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None) -> None:
        self._world, self._group = world, group
        self._terms: dict[str, Tensor] = {}
        self._fresh: set[str] = set()
        """Lines of backwards since an optimizer has stepped: their losses add up."""
        self._running: tuple[Tensor, Tensor | None, Sequence[dist.Work]] | None = None

    def add(self, term: Tensor) -> None:
        """Notes this process's term of the loss whose backward the script calls now."""
        if term.numel() != 1:
            return
        value, line = term.detach().double().reshape(()), _line()
        before = self._terms.get(line) if line in self._fresh else None
        self._terms[line] = value if before is None else before + value
        self._fresh.add(line)

    def stepped(self) -> None:
        """Notes that an optimizer has stepped."""
        self._fresh.clear()

    def end_step(self, numbers: Sequence[float]) -> None:
        """Begins to sum the step's losses, and further numbers. Collective."""
        sums, terms = torch.tensor(numbers, dtype=torch.float64), list(self._terms.values())
        losses = torch.stack([each.to(terms[0].device) for each in terms]) if terms else None
        self._terms.clear()
        works = []
        if self._world.size > 1:
            works.append(dist.all_reduce(sums, group=self._world.control, async_op=True))
        if self._group is not None and losses is not None:  # on a GPU by its own library: nothing waits for the losses
            works.append(dist.all_reduce(losses, group=self._group, async_op=True))
        self._running = sums, losses, works

    def sums(self) -> tuple[list[float], list[float]] | None:
        """Waits for the sums of the last step's numbers and of its losses; None if they were returned already."""
        if self._running is None:
            return None
        (sums, losses, works), self._running = self._running, None
        for work in works:
            work.wait()
        return sums.tolist(), [] if losses is None else losses.tolist()


def _line() -> str:
    """Returns the innermost line of the script that runs now."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
