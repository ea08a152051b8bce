"""Sums of traced operators: seconds by kind of kernel, those of the host, and the user's lines that take most."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

KINDS = ("matrix", "copy", "cast", "read", "view", "other")
MESSAGES = ("message", "launch")
"""Kinds of calls that are not computing: kernels while others are waited for, and collectives while nothing is."""
TINY = 32 << 10
"""Bytes that an operator reads and writes in about a microsecond, less than it takes to call it."""


class Call(NamedTuple):
    """One call of an operator in a forward or backward, or of one that fills or empties a message."""

    name: str
    kind: str
    """One of KINDS, or of MESSAGES."""
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
    """Seconds of a matrix product in the other precision, or those to free a copy's memory; None: not tried."""
    kernel: float = 0.0
    """Seconds without dispatch; on a GPU, of its kernels."""
    module: int | None = None
    """The module that called it, as ModuleTimes has it; None: it is not known, or no forward's."""


class Floor(NamedTuple):
    """The least that any operator takes on the host."""

    gap: float
    """Seconds before it, while it is traced."""
    seconds: float
    """Seconds in it, while it is traced."""
    plain: float
    """Seconds of it, while nothing is traced."""

    @property
    def traces(self) -> float:
        """Computes the seconds that the trace itself adds to each operator."""
        return max(0.0, self.gap + self.seconds - self.plain)


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
    """Seconds in copies within one type, a change of layout or of place, and in freeing their memory in forward."""
    casts: float
    """Seconds in copies to another type."""
    elementwise: float
    """Seconds in all other kernels, which memory bounds."""
    host: float
    """Host seconds between kernels: dispatch, and gaps between operators, the trace's own time in them included."""
    reads: float
    """Host seconds at lines that read values of tensors, without the trace's own time."""
    messages: float
    """Seconds in kernels that fill and empty what is sent, after the last gradient: DDP's buckets, say."""
    launches: float
    """Host seconds in collectives that are called in forward and backward, FSDP's say, and not in waits for them."""
    host_lines: tuple[LineCost, ...]
    read_lines: tuple[LineCost, ...]
    copy_lines: tuple[LineCost, ...]

    @property
    def kernels(self) -> float:
        """Sums the seconds in kernels."""
        return self.matrix + self.copies + self.casts + self.elementwise


def kernel(call: Call, floor: Floor) -> float:
    """Computes the seconds of a kernel on a CPU: those of a view and of a tiny operator are all for its call."""
    if call.kind == "launch":
        return call.seconds
    return max(0.0, call.seconds - _called(call, floor))


def summarised(
    steps: Sequence[Sequence[Call]],
    tried: Sequence[Call],
    floor: Floor,
    modules: Mapping[int | None, float] | None = None,
    *,
    on_device: bool,
) -> Traced:
    """Summarises traced steps; of steps with the same operators, each operator's median counts.

    Args:
        tried: calls of further steps, in which matrix products and copies were called once more.
        floor: from `operators.least`.
        modules: seconds of modules in steps that were not traced, to which their kernels are made longer, and from
            which the seconds of lines that read values follow.
    """
    same = len({tuple(call.name for call in calls) for calls in steps}) == 1
    rows = (
        [_middle(column) for column in zip(*steps, strict=True)]
        if same
        else [call for calls in steps for call in calls]
    )
    parts = 1 if same else len(steps)
    between = {kind: [call.kernel for call in rows if call.kind == kind] for kind in MESSAGES}
    times = {} if on_device else modules or {}
    rows = [call for call in rows if call.kind not in MESSAGES]
    rows = _with_memory(rows, times, _freed(tried), floor, parts)
    sums = dict.fromkeys(KINDS, 0.0)
    host: dict[str, list[float]] = {}
    copies: dict[str, list[float]] = {}
    for call in rows:
        sums[call.kind] += call.kernel
        _add(host, call.line, max(0.0, call.gap + _called(call, floor) - floor.traces))
        if call.kind == "copy":
            _add(copies, call.line, call.kernel)
    reads = collections.Counter(call.line for call in rows if call.kind == "read" and call.line)
    return Traced(
        clock="device" if on_device else "host",
        operators=len(rows) / parts,
        flops=sum(call.flops for call in rows) / parts,
        matrix=sums["matrix"] / parts,
        other_part=_other_part(tried),
        copies=sum(seconds for _, seconds in copies.values()) / parts,
        casts=sums["cast"] / parts,
        elementwise=(sums["other"] + sums["read"]) / parts,
        host=sum(call.gap + _called(call, floor) for call in rows) / parts,
        reads=_reading(rows, host, reads, times, floor, parts),
        messages=sum(between["message"]) / parts,
        launches=sum(between["launch"]) / parts,
        host_lines=_top({line: cost for line, cost in host.items() if line not in reads}, parts),
        read_lines=_top({line: [count, host[line][1]] for line, count in reads.items()}, parts),
        copy_lines=_top(copies, parts),
    )


def _with_memory(
    rows: Sequence[Call],
    modules: Mapping[int | None, float],
    freed: Callable[[Call], float],
    floor: Floor,
    parts: float,
) -> Sequence[Call]:
    """Adds to copies the seconds in which their memory is `freed`, and to kernels what their module has besides.

    What kernels, freeing and the host leave of a module's seconds without a trace takes and gives back memory, too,
    which a step under a trace finds in the heap.
    """
    factors, inside = {}, _by_module(rows)
    for module, seconds in modules.items():
        kernels = sum(call.kernel for call in inside[module]) / parts
        others = sum(call.gap + _called(call, floor) + freed(call) for call in inside[module]) / parts
        factors[module] = max(1.0, (seconds - others) / kernels) if kernels else 1.0
    return [call._replace(kernel=call.kernel * factors.get(call.module, 1.0) + freed(call)) for call in rows]


def _reading(
    rows: Sequence[Call],
    host: Mapping[str, Sequence[float]],
    lines: Collection[str],
    modules: Mapping[int | None, float],
    floor: Floor,
    parts: float,
) -> float:
    """Computes the host's seconds at lines that read values.

    A read is so quick that a trace takes ten times as long. So of a module whose seconds without a trace are known
    those count that its kernels leave, in proportion to the host's seconds at such lines and at others.
    """
    there = {call.module for call in rows if call.line in lines}
    if not there <= modules.keys():
        return sum(host[line][1] for line in lines) / parts
    found, inside = 0.0, _by_module(rows)
    for module in there:
        kernels = sum(call.kernel for call in inside[module]) / parts
        reading, whole = (
            sum(call.gap + _called(call, floor) for call in calls)
            for calls in ([one for one in inside[module] if one.line in lines], inside[module])
        )
        found += max(0.0, modules[module] - kernels) * reading / whole
    return found


def _by_module(rows: Iterable[Call]) -> Mapping[int | None, list[Call]]:
    found: dict[int | None, list[Call]] = collections.defaultdict(list)
    for call in rows:
        found[call.module].append(call)
    return found


def _called(call: Call, floor: Floor) -> float:
    """Returns the host's seconds for the call of an operator."""
    whole = call.kind == "view" or (call.size <= TINY and not call.flops)
    return call.seconds if whole else min(call.seconds, floor.seconds)


def _middle(column: Sequence[Call]) -> Call:
    return column[0]._replace(
        gap=statistics.median(call.gap for call in column),
        seconds=statistics.median(call.seconds for call in column),
        kernel=statistics.median(call.kernel for call in column),
    )


def _other_part(tried: Sequence[Call]) -> float | None:
    """Computes what matrix products take in the other precision over what they take in the plan's."""
    both = [(call.seconds, call.other) for call in tried if call.flops and call.other is not None]
    return sum(other for _, other in both) / sum(seconds for seconds, _ in both) if both else None


def _freed(tried: Sequence[Call]) -> Callable[[Call], float]:
    """Returns a function: the median seconds in which a copy's memory is freed, by operator, line and bytes."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for call in tried:
        if call.kind == "copy" and call.other is not None:
            found.setdefault((call.name, call.line, call.size), []).append(call.other)
    known = {key: statistics.median(seconds) for key, seconds in found.items()}
    return lambda call: known.get((call.name, call.line, call.size), 0.0) if call.kind == "copy" else 0.0


def _add(lines: dict[str, list[float]], line: str, seconds: float) -> None:
    cost = lines.setdefault(line, [0, 0.0])
    cost[0] += 1
    cost[1] += seconds


def _top(lines: dict[str, list[float]], parts: float, most: int = 5) -> tuple[LineCost, ...]:
    found = sorted(lines.items(), key=lambda one: -one[1][1])[:most]
    return tuple(
        LineCost(line=line, calls=calls / parts, seconds=seconds / parts) for line, (calls, seconds) in found
    )
