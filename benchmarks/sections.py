"""Profile of a step's microseconds: functions wrapped with a clock, each without the time of wrapped callees.

A wrapped call costs a little itself; what an empty one costs is measured and taken off again. Read it to find
what is dear; what a step really costs is what the rotation says.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import rotation
from benchmarks.figures import machine, table
from benchmarks.pacer import Seat

SKIPPED = 500  # steps before the clock runs
COMMON = {
    "network": ("benchmarks.tiny:Tiny.__call__",),
    "DDP": ("torch.nn.parallel:DistributedDataParallel.__call__",),
    "cross entropy": ("torch.nn.functional:cross_entropy",),
    "backward": ("torch.autograd:backward",),
    "optimizer's step": ("torch.optim:SGD.step",),
    "zero_grad": ("torch.optim:Optimizer.zero_grad",),
}
GRAPPE = {
    "backward": ("grappe.engines.native:backward",),
    "feed": ("grappe.training.loop:Training._timed.__next__", "grappe.data.loader:BatchLoader._microbatch"),
    "ledger": ("grappe.data.sampling:SampleOrder.ids",),
    "gather": ("grappe.data.arrays:Arrays.gather",),
    "seed dropout": ("grappe.engines.native:seed_dropout",),
    "engine's own": (
        "grappe.engines.native:Native.step",
        "grappe.engines.native:WholeGradients.gradients",
        "grappe.engines.native:MicrobatchRunner.loss",
    ),
    "losses: check": ("grappe.step.loss:Losses.values",),
    "losses: gradient": ("grappe.step.loss:Losses._output_gradient",),
    "losses: sum": ("grappe.step.loss:Losses.total",),
    "loss reduction": (
        "grappe.step.loss:LossReduction.payload",
        "grappe.step.loss:LossReduction.start",
        "grappe.step.loss:LossReduction.sums",
        "grappe.parallel.replicate:DDPReduction.start",
        "grappe.parallel.replicate:DDPReduction.sums",
    ),
    "read the sums": ("grappe.step.loss:Sums.read",),
    "after's own": ("grappe.training.loop:Training.after", "grappe.training.loop:Training._read_previous_step"),
    "console": ("grappe.training.watchers.console:Console.stepped",),
    "console: draw": ("grappe.training.watchers.console:Console._refresh",),
    "curves": ("grappe.training.watchers.curves:Curves.stepped",),
    "curves: write": ("grappe.training.watchers.curves:Curves._flush",),
}


class Sections:
    """Seconds by section, without those of the sections called from within."""

    def __init__(self, cost: float = 0.0) -> None:
        """`cost`: what wrapping adds to a call, seconds; kept out of the caller's account."""
        self._cost = cost
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.missing: list[str] = []
        self._inner = [0.0]

    def wrapped(self, function: Callable[..., Any], section: str) -> Callable[..., Any]:
        """The same function, timed."""
        seconds, calls, inner, clock = self.seconds, self.calls, self._inner, time.perf_counter
        cost = self._cost
        seconds.setdefault(section, 0.0)
        calls.setdefault(section, 0)

        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            inner.append(0.0)
            began = clock()
            try:
                return function(*arguments, **keywords)
            finally:
                took = clock() - began
                seconds[section] += took - inner.pop()
                calls[section] += 1
                inner[-1] += took + cost

        return timed

    def wrap(self, section: str, place: str) -> None:
        """Times "module:Class.method" or "module:function"; a name that is gone is noted.

        "…:Class.method.__next__" is for a method that returns an iterator: its steps are timed.
        """
        module, _, path = place.partition(":")
        *owners, name = path.removesuffix(".__next__").split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part, None)
        function = getattr(owner, name, None)
        if function is None:
            self.missing.append(place)
            return
        if path.endswith(".__next__"):
            setattr(owner, name, lambda *given: _Steps(self.wrapped(function(*given).__next__, section)))
        elif owner is not None and isinstance(vars(owner).get(name), staticmethod):
            setattr(owner, name, staticmethod(self.wrapped(function, section)))
        else:
            setattr(owner, name, self.wrapped(function, section))

    def start(self) -> None:
        """Forgets what was counted so far."""
        for section in self.seconds:
            self.seconds[section], self.calls[section] = 0.0, 0


class _Steps:
    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> Any:
        return self._step()


class Stopwatch:
    """Takes a Pacer's place: lets the loop run for so many steps and reports through `pipe`."""

    def __init__(self, sections: Sections, steps: int, pipe: Connection) -> None:
        self._sections, self._steps, self._pipe = sections, steps, pipe
        self._count, self._began = 0, 0.0

    def tick(self) -> bool:
        """A step is over."""
        self._count += 1
        if self._count == SKIPPED:
            self._sections.start()
            self._began = time.perf_counter()
        if self._count == SKIPPED + self._steps:
            took = (time.perf_counter() - self._began) / self._steps
            self._pipe.send((took, self._sections.seconds, self._sections.calls, self._sections.missing))
            self._pipe.recv()
        return False


def main(processes: Sequence[int], steps: int) -> None:
    """Prints a table of sections for each number of processes, grappe's beside the hand-written loop's."""
    cost = _cost_of_wrapping()
    for size in processes:
        print(f"\n## Sections of a step, {size} process{'es' if size > 1 else ''} (process 0)\n")
        print(f"{machine()}; {steps} steps, {cost * 1e6:.2f} µs taken off for each wrapped call.\n")
        theirs, ours = (_run(module, size, steps, cost) for module in ("handwritten", "grappe"))
        print(table(("section", "hand-written, µs", "grappe, µs", "calls a step"), _rows(theirs, ours, cost, steps)))
        for place in ours[3]:
            print(f"\nnot timed, since it is gone: {place}")


def _rows(theirs: tuple, ours: tuple, cost: float, steps: int) -> list[list[str]]:
    columns = [_net(found, cost, steps) for found in (theirs, ours)]
    calls = ours[2]
    rows = []
    for section in [*dict.fromkeys([*COMMON, *GRAPPE]), "all else", "a step"]:
        cells = [f"{column[section] * 1e6:.1f}" if column.get(section) else "" for column in columns]
        if any(cells):
            rows.append([section, *cells, f"{calls.get(section, 0) / steps:.3g}"])
    return rows


def _net(found: tuple, cost: float, steps: int) -> dict[str, float]:
    """Seconds a step by section."""
    whole, seconds, calls, _ = found
    net = {section: value / steps for section, value in seconds.items()}
    inner = sum(calls.values()) / steps * cost
    rest = whole - sum(net.values()) - inner
    return {**net, "all else": rest, "a step": whole - inner}


def _run(module: str, size: int, steps: int, cost: float) -> tuple:
    """Process 0's (seconds a step, seconds and calls by section, names not found)."""
    context = multiprocessing.get_context("spawn")
    port = rotation.free_port()
    members = []
    with tempfile.TemporaryDirectory(prefix="grappe-bench-", ignore_cleanup_errors=True) as folder:
        for rank in range(size):
            ours, theirs = context.Pipe()
            seat = Seat(rank=rank, size=size, folder=Path(folder))
            process = context.Process(target=_sit, args=(module, seat, steps, cost, theirs, port), daemon=True)
            process.start()
            theirs.close()
            members.append((process, ours))
        try:
            return [pipe.recv() for _, pipe in members][0]  # noqa: RUF015  the others are waited for
        finally:
            for process, _ in members:
                process.kill()
                process.join()


def _sit(module: str, seat: Seat, steps: int, cost: float, pipe: Connection, port: int) -> None:
    rotation.environment(seat, port)
    import torch

    torch.set_num_threads(1)
    contender = importlib.import_module(f"benchmarks.contenders.{module}")
    torch.optim.SGD([torch.zeros(1)])  # torch wraps step() when the first is made: that is to be inside the clock
    sections = Sections(cost)
    for section, places in [*COMMON.items(), *(GRAPPE.items() if module == "grappe" else ())]:
        for place in places:
            sections.wrap(section, place)
    contender.run(seat, Stopwatch(sections, steps, pipe))


def _cost_of_wrapping(calls: int = 100_000) -> float:
    """Seconds that wrapping adds to a call."""

    def empty() -> None:
        pass

    timed = Sections().wrapped(empty, "empty")
    took = []
    for function in (empty, timed):
        began = time.perf_counter()
        for _ in range(calls):
            function()
        took.append(time.perf_counter() - began)
    return (took[1] - took[0]) / calls
