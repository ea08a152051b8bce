"""Traces the operators of steps: seconds and FLOPs by kind of kernel and by the user's line, and the host's seconds."""

from __future__ import annotations

import collections
import contextlib
import statistics
import sys
import time
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from grappe.errors.user_line import is_users_file
from grappe.private_api.torch import TorchDispatchMode, tree_leaves
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import BACKWARD, FORWARD

COPIES = frozenset({"clone", "copy_", "_to_copy", "contiguous", "_foreach_copy_"})
READS = frozenset({"_local_scalar_dense", "nonzero", "equal", "is_nonzero"})
"""Operators that give a value to Python: on a GPU the host waits for all that was queued before."""
COLLECTIVES = ("c10d", "_c10d_functional")
LABEL = "grappe-operator-"
DEEPEST = 60  # frames that are searched for a line of the user's
TINY = 32 << 10
"""Bytes that an operator reads and writes in about a microsecond, less than it takes to call it."""
KERNEL = 2  # place of the kernel's seconds in LineCost's figures
LAUNCH = 10e-6  # host seconds of a call on a GPU, at most: in more it waits


class LineCost(NamedTuple):
    """The cost of one line's operators of one kind in forward and backward, per step."""

    kind: str = "other"
    """"matrix" (products, convolutions, attention), "copy" (within a type), "read", "collective" or "other"."""
    line: str = ""
    """The user's line, `file:number`; "" if no line of the user's called it, as in backward."""
    calls: float = 0.0
    host: float = 0.0
    """Host seconds between kernels: dispatch, and gaps before operators. The trace's own time is in them."""
    kernel: float = 0.0
    """Seconds of kernels."""
    flops: float = 0.0


class OperatorTrace(TorchDispatchMode):
    """Mode that records the operators of forward and backward, below autograd and autocast.

    Args:
        on_gpu: whether a profiler gives the seconds of kernels; if not, operators are timed by the host's clock, as a
            CPU's are over when they return.
    """

    def __init__(self, chronometer: Chronometer, *, on_gpu: bool = False) -> None:
        super().__init__()
        self._chronometer, self._profiler = chronometer, None
        if on_gpu:
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=kinds)
        self._left = time.perf_counter()
        self._steps: list[dict[tuple[str, str], list[float]]] = []
        self._calls: list[list[float]] = []
        self._users: dict[str, bool] = {}
        self.end_step()

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
        self._steps.append(collections.defaultdict(lambda: [0.0] * 4))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began, keywords = time.perf_counter(), kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # of a DTensor: its local tensors come here again
        if self._chronometer.phase not in (FORWARD, BACKWARD) or func.namespace == "profiler":
            return func(*args, **keywords)
        host = began - max(self._left, self._chronometer.since)
        is_collective, label = func.namespace in COLLECTIVES, f"{LABEL}{len(self._calls)}"
        is_labelled = self._profiler is not None and not is_collective  # NCCL's kernels run beside others
        called = time.perf_counter()
        with torch.profiler.record_function(label) if is_labelled else contextlib.nullcontext():
            output = func(*args, **keywords)
        seconds, kernel = time.perf_counter() - called, 0.0
        count = flop_registry.get(func.overloadpacket)
        flops = 0 if count is None else int(count(*args, **keywords, out_val=output))
        tensors = [leaf for leaf in tree_leaves((args, keywords, output)) if isinstance(leaf, Tensor)]
        name = func.name().partition("::")[2].partition(".")[0]
        if is_collective:
            kind = "collective"
        elif flops:
            kind = "matrix"
        elif name in READS:
            kind = "read"
        else:
            kind = "copy" if name in COPIES and len({tensor.dtype for tensor in tensors}) < 2 else "other"
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self._profiler is not None:
            host += min(seconds, LAUNCH)
        elif not is_collective and (func.is_view or (size <= TINY and not flops)):  # all of it is the call
            host += seconds
        else:
            kernel = seconds
        row = self._steps[-1][kind, self._line()]
        row[:] = (old + new for old, new in zip(row, (1.0, host, kernel, flops), strict=True))
        self._calls.append(row)
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

    def costs(self) -> tuple[LineCost, ...]:
        """Returns the costs of lines, each the median of the steps that ended."""
        if self._profiler is not None:
            for call, seconds in kernels_by_call(self._profiler.events()).items():
                self._calls[call][KERNEL] += seconds
        steps = self._steps[:-1]
        return tuple(
            LineCost(kind, line, *(statistics.median(step[kind, line][place] for step in steps) for place in range(4)))
            for kind, line in dict.fromkeys(key for step in steps for key in step)
        )


def kernels_by_call(events: Any) -> dict[int, float]:
    """Sums kernels' seconds by number of call. A label has the kernels of all that was called inside it."""
    seconds: dict[int, float] = collections.defaultdict(float)
    for event in events:
        # The same label is on the GPU's own timeline once more.
        if event.name.startswith(LABEL) and event.device_type == torch.autograd.DeviceType.CPU:
            seconds[int(event.name.removeprefix(LABEL))] += event.device_time_total / 1e6
    return seconds
