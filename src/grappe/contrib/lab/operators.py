"""Traces the operators of steps: seconds and FLOPs by kind of kernel, the host's seconds, and the user's lines."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from grappe.errors.user_line import is_users_file
from grappe.private_api.torch import TorchDispatchMode, tree_leaves
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import BACKWARD, COMMUNICATION, FORWARD

COPIES = frozenset({"clone", "copy_", "_to_copy", "contiguous", "_foreach_copy_"})
READS = frozenset({"_local_scalar_dense", "nonzero", "equal", "is_nonzero"})
"""Operators that give a value to Python: on a GPU the host waits for all that was queued before."""
COLLECTIVES = ("c10d", "_c10d_functional")
NOT_AN_OPERATOR = (*COLLECTIVES, "profiler")
"""Namespaces whose time belongs to other processes, or to a profiler."""
LABEL = "grappe-operator-"
CALIBRATED = 300  # operators of one number each, from which the dispatch of any operator follows
TRACED_PHASES = (FORWARD, BACKWARD, COMMUNICATION)
DEEPEST = 60  # frames that are searched for a line of the user's
TINY = 32 << 10
"""Bytes that an operator reads and writes in about a microsecond, less than it takes to call it."""
LINES = 5  # that are listed of each kind


class OperatorCall(NamedTuple):
    """One call of an operator in a forward or backward, or of one that fills or empties a message."""

    name: str
    kind: str
    """"matrix", "copy", "cast", "read", "view" or "other"; "message": it runs while processes wait for others;
    "launch": a collective that is called while no process waits."""
    line: str
    """The user's line, `file:number`; "" if no line of the user's called it, as in backward."""
    gap: float
    """Host seconds since the operator before."""
    seconds: float
    """Host seconds of the operator."""
    flops: int
    size: int
    """Bytes of the tensors that it reads and writes."""
    kernel: float = 0.0
    """Seconds without dispatch; on a GPU, of its kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineCost:
    """The cost of one line of the user's, per step."""

    line: str
    calls: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorTotals:
    """The operators of one process's forward and backward, per step. Seconds of kernels are without their dispatch."""

    clock: str
    """"host", or "device" if kernels were timed on a GPU."""
    operators: float
    """Number of operators."""
    flops: float
    matrix: float
    """Seconds in matrix products, convolutions and attention."""
    copies: float
    """Seconds in copies within one type: a change of layout or of place."""
    casts: float
    """Seconds in copies to another type."""
    elementwise: float
    """Seconds in all other kernels, which memory bounds."""
    host: float
    """Host seconds between kernels: dispatch, and gaps between operators. The trace's own time is in them."""
    reads: float
    """Those of `host` at lines that read values of tensors."""
    messages: float
    """Seconds in kernels that fill and empty what is sent, after the last gradient: DDP's buckets, say."""
    launches: float
    """Host seconds in collectives that are called in forward and backward, FSDP's say, and not in waits for them."""
    host_lines: tuple[LineCost, ...]
    read_lines: tuple[LineCost, ...]
    copy_lines: tuple[LineCost, ...]


class OperatorTrace(TorchDispatchMode):
    """Mode that records the operators of forward and backward, below autograd and autocast.

    Args:
        on_gpu: whether a profiler gives the seconds of each call's kernels; if not, operators are timed by the host's
            clock, as a CPU's are over when they return.
    """

    def __init__(self, chronometer: Chronometer, *, on_gpu: bool = False) -> None:
        super().__init__()
        self._chronometer, self._profiler = chronometer, None
        if on_gpu:
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=kinds)
        self._left, self._gap = time.perf_counter(), 0.0
        self.calls: list[OperatorCall] = []
        self._ends: list[int] = []
        self._users: dict[str, bool] = {}

    def __enter__(self) -> Self:
        if self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.__enter__()
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        if self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.__exit__(exc_type, exc_val, exc_tb)

    def end_step(self) -> None:
        """Ends a step."""
        self._ends.append(len(self.calls))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began, keywords = time.perf_counter(), kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # of a DTensor: its local tensors come here again
        phase = self._chronometer.phase
        if phase in (FORWARD, BACKWARD):  # else all but the operators themselves is waiting
            self._gap += began - max(self._left, self._chronometer.since)
        if phase not in TRACED_PHASES or func.namespace in NOT_AN_OPERATOR:
            output = func(*args, **keywords)
            if func.namespace in COLLECTIVES and phase in (FORWARD, BACKWARD):
                self.calls.append(OperatorCall(func.name(), "launch", "", 0.0, time.perf_counter() - began, 0, 0))
            self._left = time.perf_counter()
            return output
        gap, self._gap = self._gap, 0.0
        if self._profiler is None:
            began = time.perf_counter()
            output = func(*args, **keywords)
        else:
            with torch.profiler.record_function(f"{LABEL}{len(self.calls)}"):
                output = func(*args, **keywords)
        seconds = time.perf_counter() - began
        name = func.name().partition("::")[2].partition(".")[0]
        count = flop_registry.get(func.overloadpacket)
        flops = 0 if count is None else int(count(*args, **keywords, out_val=output))
        tensors = [leaf for leaf in tree_leaves((args, keywords, output)) if isinstance(leaf, Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if phase == COMMUNICATION:
            kind = "message"
        elif func.is_view:
            kind = "view"
        elif flops:
            kind = "matrix"
        elif name in READS:
            kind = "read"
        elif name in COPIES:
            kind = "copy" if len({tensor.dtype for tensor in tensors}) < 2 else "cast"
        else:
            kind = "other"
        self.calls.append(OperatorCall(name, kind, self._line(), gap, seconds, flops, size))
        self._left = time.perf_counter()
        return output

    def _line(self) -> str:
        """Finds the innermost line of the user's on the stack."""
        frame, users = sys._getframe(2), self._users
        for _ in range(DEEPEST):
            if frame is None:
                return ""
            file = frame.f_code.co_filename
            if file not in users:
                users[file] = is_users_file(file)
            if users[file]:
                return f"{file}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def totals(self, dispatch: float) -> OperatorTotals | None:
        """Sums up the steps that ended; None if nothing was computed in them.

        Args:
            dispatch: from `measure_dispatch`.
        """
        device = None if self._profiler is None else kernels_by_call(self._profiler.events())
        calls = [
            call._replace(kernel=kernel(call, dispatch) if device is None else device.get(number, 0.0))
            for number, call in enumerate(self.calls)
        ]
        steps = [calls[a:b] for a, b in itertools.pairwise([0, *self._ends]) if a < b]
        return summed(steps, dispatch, on_device=device is not None) if steps else None


def measure_dispatch(chronometer: Chronometer) -> float:
    """Measures the seconds that a traced operator takes at least, by a sum of two numbers."""
    a, b = torch.ones(1), torch.ones(1)
    trace = OperatorTrace(chronometer)
    with chronometer.during(FORWARD), torch.no_grad(), trace:
        for _ in range(CALIBRATED):
            torch.add(a, b)
    return statistics.median(call.seconds for call in trace.calls[CALIBRATED // 10 :])


def kernel(call: OperatorCall, dispatch: float) -> float:
    """Computes the seconds of a kernel on a CPU: a view's and a tiny operator's are all dispatch."""
    return call.seconds if call.kind == "launch" else max(0.0, call.seconds - dispatched(call, dispatch))


def dispatched(call: OperatorCall, dispatch: float) -> float:
    """Returns the host's seconds for the call of an operator."""
    if call.kind == "view" or (call.size <= TINY and not call.flops):
        return call.seconds
    return min(call.seconds, dispatch)


def summed(steps: Sequence[Sequence[OperatorCall]], dispatch: float, *, on_device: bool) -> OperatorTotals:
    """Sums up traced steps; of steps with the same operators, each operator's median counts.

    Args:
        dispatch: from `measure_dispatch`.
    """
    if len({tuple(call.name for call in calls) for calls in steps}) == 1:
        count, rows = 1, []
        for calls in zip(*steps, strict=True):
            medians = {
                name: statistics.median(getattr(call, name) for call in calls) for name in ("gap", "seconds", "kernel")
            }
            rows.append(calls[0]._replace(**medians))
    else:
        count, rows = len(steps), [call for calls in steps for call in calls]
    kinds: dict[str, float] = collections.defaultdict(float)
    host: dict[str, list[float]] = collections.defaultdict(list)
    copies: dict[str, list[float]] = collections.defaultdict(list)
    reads: collections.Counter[str] = collections.Counter()
    for call in rows:
        kinds[call.kind] += call.kernel / count
        if call.kind in ("message", "launch"):
            continue
        host[call.line].append(call.gap + dispatched(call, dispatch))
        if call.kind == "copy":
            copies[call.line].append(call.kernel)
        if call.kind == "read" and call.line:
            reads[call.line] += 1

    def costs(lines: Iterable[tuple[str, float, float]]) -> tuple[LineCost, ...]:
        largest = sorted(lines, key=lambda cost: -cost[2])[:LINES]
        return tuple(
            LineCost(line=line, calls=calls / count, seconds=seconds / count) for line, calls, seconds in largest
        )

    return OperatorTotals(
        clock="device" if on_device else "host",
        operators=sum(len(calls) for calls in host.values()) / count,
        flops=sum(call.flops for call in rows) / count,
        matrix=kinds["matrix"],
        copies=kinds["copy"],
        casts=kinds["cast"],
        elementwise=kinds["other"] + kinds["read"],
        host=sum(map(sum, host.values())) / count,
        reads=sum(sum(host[line]) for line in reads) / count,
        messages=kinds["message"],
        launches=kinds["launch"],
        host_lines=costs((line, len(each), sum(each)) for line, each in host.items() if line not in reads),
        read_lines=costs((line, calls, sum(host[line])) for line, calls in reads.items()),
        copy_lines=costs((line, len(each), sum(each)) for line, each in copies.items()),
    )


def kernels_by_call(events: Any) -> dict[int, float]:
    """Sums kernels' seconds by number of call. A label has the kernels of all that was called inside it."""
    seconds: dict[int, float] = collections.defaultdict(float)
    for event in events:
        # The same label is on the GPU's own timeline once more.
        if event.name.startswith(LABEL) and event.device_type == torch.autograd.DeviceType.CPU:
            seconds[int(event.name.removeprefix(LABEL))] += event.device_time_total / 1e6
    return seconds
