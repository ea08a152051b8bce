"""Traces the operators of steps: kernels' seconds, FLOPs, bytes, and the user's lines that called them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from grappe.errors.user_code import is_users_file
from grappe.private_api.torch import TorchDispatchMode, tree_leaves, tree_map
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import BACKWARD, FORWARD

KINDS = ("matrix", "copy", "cast", "read", "view", "other")
COPIES = frozenset({"clone", "copy_", "_to_copy", "contiguous", "_foreach_copy_"})
READS = frozenset({"_local_scalar_dense", "nonzero", "equal", "is_nonzero"})
"""Operators that give a value to Python: on a GPU the host waits for all that was queued before."""
NOT_AN_OPERATOR = ("c10d", "_c10d_functional", "profiler")
"""Namespaces whose time is that of other processes, or of a profiler."""
LABEL = "grappe-operator-"
CALIBRATED = 300  # operators of one number each, by which the least time of any is known
TINY = (
    32 << 10
)  # bytes that an operator reads and writes in about a microsecond, less than it takes to call it
DEEPEST = 60  # frames that are looked through for a line of the user's


class Call(NamedTuple):
    """One call of an operator in a forward or backward."""

    name: str
    kind: str
    """One of KINDS."""
    line: str
    """The user's line, `file:number`; "" if no line of the user's called it, as in backward."""
    gap: float
    """Host seconds since the operator before."""
    seconds: float
    """Host seconds of the operator."""
    flops: int
    size: int
    """Bytes of the tensors that it reads and writes."""
    other: float | None = None
    """Seconds of the same operator in the other precision; None: it was not tried."""
    kernel: float = 0.0
    """Seconds without dispatch; on a GPU, of its kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineCost:
    """The cost of one line of the user's, per step."""

    line: str
    calls: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """The operators of one process's forward and backward, per step. Seconds of kernels are without their dispatch."""

    clock: str
    """"host", or "device" if kernels were timed on a GPU."""
    operators: float
    """Number of operators."""
    flops: float
    matrix: float
    """Seconds in matrix products, convolutions and attention."""
    other_part: float | None
    """Ratio of their seconds in the other precision to those in the plan's; None: it was not tried."""
    copies: float
    """Seconds in copies within one type: a change of layout, or of place."""
    casts: float
    """Seconds in copies to another type."""
    elementwise: float
    """Seconds in all other kernels, which memory bounds."""
    host: float
    """Host seconds between kernels: dispatch, and gaps between operators, the trace's own time in them included."""
    reads_part: float
    """Part, 0 to 1, of the host's seconds at lines that read values of tensors."""
    host_lines: tuple[LineCost, ...]
    read_lines: tuple[LineCost, ...]
    copy_lines: tuple[LineCost, ...]

    @property
    def kernels(self) -> float:
        """Sums the seconds in kernels."""
        return self.matrix + self.copies + self.casts + self.elementwise


class OperatorTrace(TorchDispatchMode):
    """Mode that records the operators of forward and backward, below autograd and autocast.

    Args:
        other: the type whose matrix products are tried beside the plan's; None: none is.
        device_seconds: after the trace, returns kernels' seconds by number of call; None: operators are timed by the
            host's clock, as a CPU's are over when they return.
    """

    def __init__(
        self,
        chronometer: Chronometer,
        other: torch.dtype | None = None,
        device_seconds: Callable[[], dict[int, float]] | None = None,
    ) -> None:
        super().__init__()
        self._chronometer, self._other, self._device_seconds = chronometer, other, device_seconds
        self._weights = Weights(chronometer.parameters)
        self._left = time.perf_counter()
        self._calls: list[Call] = []
        self._ends: list[int] = []
        self._users: dict[str, bool] = {}
        self._trying = False

    def end_step(self, *, then_try: bool = False) -> None:
        """Ends a step; with `then_try`, the next one tries its matrix products in the other precision."""
        if not self._trying:
            self._ends.append(len(self._calls))
        self._trying = then_try and self._other is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began, keywords = time.perf_counter(), kwargs or {}
        if any(one.__torch_dispatch__ is not Tensor.__torch_dispatch__ for one in types):
            return NotImplemented  # of a DTensor: what it is made of comes here again
        phase = self._chronometer.phase
        if phase not in (FORWARD, BACKWARD) or func.namespace in NOT_AN_OPERATOR:
            output = func(*args, **keywords)
            self._left = time.perf_counter()
            return output
        gap = began - max(self._left, self._chronometer.since)
        if self._device_seconds is None:
            began = time.perf_counter()
            output = func(*args, **keywords)
        else:
            with torch.profiler.record_function(f"{LABEL}{len(self._calls)}"):
                output = func(*args, **keywords)
        seconds = time.perf_counter() - began
        self._calls.append(self._call(func, args, keywords, output, gap, seconds))
        self._left = time.perf_counter()
        return output

    def _call(self, func: Any, args: Any, keywords: Any, output: Any, gap: float, seconds: float) -> Call:
        name = func.name().partition("::")[2].partition(".")[0]
        count = flop_registry.get(func.overloadpacket)
        flops = 0 if count is None else int(count(*args, **keywords, out_val=output))
        tried = None
        if flops and self._trying and self._other is not None:
            forward = self._chronometer.phase == FORWARD
            tried = _seconds_in(self._other, func, args, keywords, self._weights, forward)
        tensors = [one for one in tree_leaves((args, keywords, output)) if isinstance(one, Tensor)]
        size = sum(one.numel() * one.element_size() for one in tensors)
        kind = "view" if func.is_view else _kind(name, flops, {one.dtype for one in tensors})
        return Call(name, kind, self._line(), gap, seconds, flops, size, tried)

    def _line(self) -> str:
        """Finds the innermost line of the user's on the stack."""
        frame, users = sys._getframe(3), self._users
        for _ in range(DEEPEST):
            if frame is None:
                return ""
            file = frame.f_code.co_filename
            mine = users.get(file)
            if mine is None:
                mine = users[file] = is_users_file(file)
            if mine:
                return f"{file}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def result(self, floor: tuple[float, float]) -> Traced | None:
        """Summarises the steps that ended; None if nothing was computed in them.

        Args:
            floor: from `least`.
        """
        device = None if self._device_seconds is None else self._device_seconds()
        calls = [
            call._replace(kernel=_kernel(call, floor[1]) if device is None else device.get(number, 0.0))
            for number, call in enumerate(self._calls)
        ]
        steps = [calls[a:b] for a, b in itertools.pairwise([0, *self._ends]) if a < b]
        tried = calls[self._ends[-1] :] if self._ends else []
        return summarised(steps, tried, floor, on_device=device is not None) if steps else None


def _kernel(call: Call, dispatch: float) -> float:
    """Computes the seconds of a kernel on a CPU: those of a view and of a tiny operator are all for its call."""
    return max(0.0, call.seconds - _called(call, dispatch))


def summarised(
    steps: Sequence[Sequence[Call]], tried: Sequence[Call], floor: tuple[float, float], *, on_device: bool
) -> Traced:
    """Summarises traced steps; of steps with the same operators, each operator's median counts.

    Args:
        tried: calls with operators that were tried in the other precision.
        floor: the least gap before an operator and the least seconds in it, while they are traced.
    """
    least_gap, dispatch = floor
    same = len({tuple(call.name for call in calls) for calls in steps}) == 1
    rows = (
        [_middle(column) for column in zip(*steps, strict=True)]
        if same
        else [call for calls in steps for call in calls]
    )
    parts = 1 if same else len(steps)
    sums = dict.fromkeys(KINDS, 0.0)
    host: dict[str, list[float]] = {}
    copies: dict[str, list[float]] = {}
    for call in rows:
        sums[call.kind] += call.kernel
        _add(host, call.line, max(0.0, call.gap - least_gap) + _called(call, dispatch))
        if call.kind == "copy":
            _add(copies, call.line, call.kernel)
    reads = collections.Counter(call.line for call in rows if call.kind == "read" and call.line)
    whole = sum(seconds for _, seconds in host.values()) or 1.0
    return Traced(
        clock="device" if on_device else "host",
        operators=len(rows) / parts,
        flops=sum(call.flops for call in rows) / parts,
        matrix=sums["matrix"] / parts,
        other_part=_other_part(tried),
        copies=sums["copy"] / parts,
        casts=sums["cast"] / parts,
        elementwise=(sums["other"] + sums["read"]) / parts,
        host=sum(call.gap + _called(call, dispatch) for call in rows) / parts,
        reads_part=sum(host[line][1] for line in reads) / whole,
        host_lines=_top({line: cost for line, cost in host.items() if line not in reads}, parts),
        read_lines=_top({line: [count, host[line][1]] for line, count in reads.items()}, parts),
        copy_lines=_top(copies, parts),
    )


def _called(call: Call, dispatch: float) -> float:
    """Returns the host's seconds for the call of an operator."""
    whole = call.kind == "view" or (call.size <= TINY and not call.flops)
    return call.seconds if whole else min(call.seconds, dispatch)


def _middle(column: Sequence[Call]) -> Call:
    return column[0]._replace(
        gap=statistics.median(call.gap for call in column),
        seconds=statistics.median(call.seconds for call in column),
        kernel=statistics.median(call.kernel for call in column),
    )


def _other_part(tried: Sequence[Call]) -> float | None:
    """Computes what matrix products take in the other precision over what they take in the plan's."""
    both = [(call.seconds, call.other) for call in tried if call.other is not None]
    return sum(other for _, other in both) / sum(seconds for seconds, _ in both) if both else None


def _add(lines: dict[str, list[float]], line: str, seconds: float) -> None:
    cost = lines.setdefault(line, [0, 0.0])
    cost[0] += 1
    cost[1] += seconds


def _top(lines: dict[str, list[float]], parts: float, most: int = 5) -> tuple[LineCost, ...]:
    found = sorted(lines.items(), key=lambda one: -one[1][1])[:most]
    return tuple(
        LineCost(line=line, calls=calls / parts, seconds=seconds / parts) for line, (calls, seconds) in found
    )


def _kind(name: str, flops: int, types: set[torch.dtype]) -> str:
    if flops:
        return "matrix"
    if name in READS:
        return "read"
    if name not in COPIES:
        return "other"
    return "copy" if len(types) < 2 else "cast"


class Weights:
    """This process's parameters, to be told from activations where tensors are cast."""

    def __init__(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        own = [one.to_local() if hasattr(one, "to_local") else one for _, one in parameters]
        self._places = {_place(one) for one in own}
        self._shapes = {one.shape for one in own}

    def read(self, tensor: Tensor) -> bool:
        """Returns whether the tensor is a parameter, or a view of one."""
        return _place(tensor) in self._places

    def like(self, tensor: Tensor) -> bool:
        """Returns whether the tensor has a parameter's shape, as its gradient has, or that of its transpose."""
        return tensor.shape in self._shapes or (tensor.dim() == 2 and tensor.t().shape in self._shapes)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _seconds_in(
    dtype: torch.dtype, func: Any, args: Any, keywords: Any, weights: Weights, forward: bool
) -> float | None:
    """Times an operator whose tensors have another floating type; None: it does not take that type.

    As under autocast: activations have that type already; parameters are cast in forward, their gradients in backward.
    """
    casting = 0.0

    def cast(leaf: Any) -> Any:
        nonlocal casting
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        began = time.perf_counter()
        made = leaf.to(dtype)
        if forward and weights.read(leaf):
            casting += time.perf_counter() - began
        return made

    try:
        arguments, named = tree_map(cast, (args, keywords))
        func(*arguments, **named)  # what is prepared for a first call
        began = time.perf_counter()
        output = func(*arguments, **named)
        if not forward:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and weights.like(leaf):
                    leaf.float()
        return time.perf_counter() - began + casting
    except (RuntimeError, NotImplementedError):
        return None


def least(chronometer: Chronometer) -> tuple[float, float]:
    """Measures the least gap before and the least seconds of a traced operator: a sum of two numbers, many times."""
    a, b = torch.ones(1), torch.ones(1)
    trace = OperatorTrace(chronometer)
    with chronometer.during(FORWARD), trace, torch.no_grad():
        for _ in range(CALIBRATED):
            torch.add(a, b)
    calls = trace._calls[CALIBRATED // 10 :]
    return statistics.median(call.gap for call in calls), statistics.median(call.seconds for call in calls)
