"""Checkpoint: the bytes that a process copies to host memory, so that training goes on while they are written."""

from __future__ import annotations

import heapq

from grappe.foresight.parameters import Parameter
from grappe.foresight.sharding import rows_of
from grappe.foresight.sketch import Sketch
from grappe.plan import Plan


class Turns:
    """Processes that hold the same tensors, and write them by turns: each goes to the one with the fewest bytes so far.

    As grappe.checkpoint.saver chooses them, which counts a byte more for each tensor.
    """

    def __init__(self, processes: int) -> None:
        self._loads = [(0, number) for number in range(processes)]
        self.copied = [0] * processes
        """Bytes of each process's copies."""

    def add(self, whole: int, mine: int) -> None:
        """Adds a tensor of `whole` bytes, of which a process has `mine`."""
        load, number = self._loads[0]
        heapq.heapreplace(self._loads, (load + whole + 1, number))
        self.copied[number] += mine


def copied(sketch: Sketch, plan: Plan) -> int:
    """Computes the bytes of the process that copies most; of a plan that is replicated and sharded at most."""
    split, whole = Turns(plan.replicate), Turns(plan.replicate * plan.shard)
    for one in sketch.parameters:
        for size in one.states:
            _add(one, size, plan.shard, split, whole)
        for size in one.whole_states:
            whole.add(size, size)
    averages = [one for one in sketch.parameters if one.trained and sketch.task.ema is not None]
    for one in [*sketch.parameters, *averages]:
        _add(one, one.size, plan.shard, split, whole)
    if plan.shard == 1:
        return max(whole.copied) + sketch.buffers
    return max(split.copied) + max(whole.copied) + sketch.buffers


def _add(one: Parameter, size: int, ways: int, split: Turns, whole: Turns) -> None:
    """Adds a tensor of `size` bytes that is split as the parameter is."""
    if ways == 1 or not one.shape:
        whole.add(size, size)
    else:
        split.add(size, size * rows_of(one, ways, 0) // max(1, one.shape[0]))
