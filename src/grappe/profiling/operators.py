"""Traces the operators of steps: kernels' seconds, FLOPs, bytes, and the user's lines that called them."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from grappe.errors.user_code import is_users_file
from grappe.private_api.torch import TorchDispatchMode, tree_leaves
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.module_times import ModuleTimes
from grappe.profiling.operator_sums import Call, Floor, Traced, kernel, summarised
from grappe.profiling.other_precision import Weights, seconds_in
from grappe.profiling.phases import BACKWARD, COMMUNICATION, FORWARD

COPIES = frozenset({"clone", "copy_", "_to_copy", "contiguous", "_foreach_copy_"})
NEW = frozenset({"clone", "_to_copy", "contiguous"})
"""Those that take new memory."""
READS = frozenset({"_local_scalar_dense", "nonzero", "equal", "is_nonzero"})
"""Operators that give a value to Python: on a GPU the host waits for all that was queued before."""
COLLECTIVES = ("c10d", "_c10d_functional")
NOT_AN_OPERATOR = (*COLLECTIVES, "profiler")
"""Namespaces whose time is that of other processes, or of a profiler."""
LABEL = "grappe-operator-"
CALIBRATED = 300  # operators of one number each, by which the least time of any is known
TRACED = (FORWARD, BACKWARD, COMMUNICATION)
DEEPEST = 60  # frames that are looked through for a line of the user's


class OperatorTrace(TorchDispatchMode):
    """Mode that records the operators of forward and backward, below autograd and autocast.

    Args:
        other: the type whose matrix products are tried beside the plan's; None: none is.
        device_seconds: after the trace, returns kernels' seconds by number of call; None: operators are timed by the
            host's clock, as a CPU's are over when they return.
        modules: seconds of modules in steps that were not traced; None: they were not timed.
    """

    def __init__(
        self,
        chronometer: Chronometer,
        other: torch.dtype | None = None,
        device_seconds: Callable[[], dict[int, float]] | None = None,
        modules: ModuleTimes | None = None,
    ) -> None:
        super().__init__()
        self._modules = modules
        self._chronometer, self._other, self._device_seconds = chronometer, other, device_seconds
        self._weights = Weights(chronometer.parameters)
        self._left, self._gap = time.perf_counter(), 0.0
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
        if phase in (FORWARD, BACKWARD):  # else all but the operators themselves is waiting
            self._gap += began - max(self._left, self._chronometer.since)
        if phase not in TRACED or func.namespace in NOT_AN_OPERATOR:
            output = func(*args, **keywords)
            if func.namespace in COLLECTIVES and phase in (FORWARD, BACKWARD):
                self._calls.append(Call(func.name(), "launch", "", 0.0, time.perf_counter() - began, 0, 0))
            self._left = time.perf_counter()
            return output
        gap, self._gap = self._gap, 0.0
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
            tried = seconds_in(self._other, func, args, keywords, self._weights, forward)
        elif name in NEW and self._trying and self._chronometer.phase == FORWARD:
            tried = _seconds_to_free(func, args, keywords)
        tensors = [one for one in tree_leaves((args, keywords, output)) if isinstance(one, Tensor)]
        size = sum(one.numel() * one.element_size() for one in tensors)
        kind = "view" if func.is_view else _kind(name, flops, {one.dtype for one in tensors})
        if self._chronometer.phase == COMMUNICATION:
            kind = "message"
        module = None if self._modules is None else self._modules.current
        return Call(name, kind, self._line(), gap, seconds, flops, size, tried, module=module)

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

    def result(self, floor: Floor, forward: float = 0.0) -> Traced | None:
        """Summarises the steps that ended; None if nothing was computed in them.

        Args:
            floor: from `least`.
            forward: seconds of a step's forward that was not traced.
        """
        device = None if self._device_seconds is None else self._device_seconds()
        calls = [
            call._replace(kernel=kernel(call, floor) if device is None else device.get(number, 0.0))
            for number, call in enumerate(self._calls)
        ]
        steps = [calls[a:b] for a, b in itertools.pairwise([0, *self._ends]) if a < b]
        tried = calls[self._ends[-1] :] if self._ends else []
        modules = {} if self._modules is None else self._modules.seconds(forward)
        return summarised(steps, tried, floor, modules, on_device=device is not None) if steps else None


def _kind(name: str, flops: int, types: set[torch.dtype]) -> str:
    if flops:
        return "matrix"
    if name in READS:
        return "read"
    if name not in COPIES:
        return "other"
    return "copy" if len(types) < 2 else "cast"


def _seconds_to_free(func: Any, args: Any, keywords: Any) -> float:
    """Times giving back the memory that an operator takes: a large block is unmapped page by page."""
    output = func(*args, **keywords)
    began = time.perf_counter()
    del output
    return time.perf_counter() - began


def least(chronometer: Chronometer) -> Floor:
    """Measures the least that any operator takes: a sum of two numbers, many times, traced and not."""
    a, b = torch.ones(1), torch.ones(1)
    trace = OperatorTrace(chronometer)
    plain = []
    with chronometer.during(FORWARD), torch.no_grad():
        with trace:
            for _ in range(CALIBRATED):
                torch.add(a, b)
        for _ in range(CALIBRATED):
            began = time.perf_counter()
            torch.add(a, b)
            plain.append(time.perf_counter() - began)
    calls = trace._calls[CALIBRATED // 10 :]
    return Floor(
        gap=statistics.median(call.gap for call in calls),
        seconds=statistics.median(call.seconds for call in calls),
        plain=statistics.median(plain),
    )
