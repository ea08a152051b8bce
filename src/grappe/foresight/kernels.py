"""Kernels: runs operators' kernels on this CPU, and measures the memory that a few take beyond their output."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grappe.launch.local import local
from grappe.launch.rank import ProcessRank
from grappe.launch.terminal import redirected
from grappe.private_api.torch import tree_leaves

WITH_SCRATCH = ("aten.convolution", "aten.native_layer_norm", "aten._scaled_dot_product")
"""Operators whose kernels on a CPU allocate more than their output: by oneDNN, or for each thread."""
OF_LIBRARIES = (*WITH_SCRATCH, "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.gelu", "aten.mkldnn")
"""Operators whose kernels are of libraries (oneDNN, MKL) that keep memory for their next call."""
REPEATS = 4  # of a timed kernel: the first one also makes what libraries keep
LARGEST = 2 << 30  # bytes of arguments and output; what is larger is not tried


class Form(NamedTuple):
    """A tensor without its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str
    """Type of its numbers: "float32"."""


class Call(NamedTuple):
    """An operator with its arguments, without values."""

    name: str
    """convolution.default, of torch.ops.aten"""
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    output: Any

    def starts(self, names: tuple[str, ...]) -> bool:
        """Returns whether it is one of these operators: WITH_SCRATCH, or OF_LIBRARIES."""
        return f"aten.{self.name}".startswith(names)

    @property
    def too_large(self) -> bool:
        """Returns whether it is too large to be tried."""
        return sum(map(_size, tree_leaves(tuple(self), is_leaf=lambda leaf: isinstance(leaf, Form)))) > LARGEST

    def on_ones(self) -> Callable[[], Any]:
        """Returns the operator as a function without arguments; it is called on ones, in memory of this process."""
        operator, _, overload = self.name.partition(".")
        function = getattr(getattr(torch.ops.aten, operator), overload)
        arguments = [_real(argument) for argument in self.arguments]
        return functools.partial(function, *arguments, **{key: _real(value) for key, value in self.keywords})


def describe(operator: Any, arguments: Any, keywords: Any, output: Any, *, every: bool) -> Call | None:
    """Describes an operator of aten whose kernel is in a library, or every one that computes; None: another one."""
    if operator.namespace != "aten" or operator.is_view or not (every or str(operator).startswith(OF_LIBRARIES)):
        return None
    return Call(
        str(operator).removeprefix("aten."),
        _described(arguments),
        tuple(sorted((name, _described(value)) for name, value in keywords.items())),
        _described(output),
    )


class Kernels:
    """Bytes that operators' kernels take beyond their output, each measured once.

    Args:
        scratch: whether they are measured; else they count 0.
    """

    def __init__(self, *, scratch: bool = True) -> None:
        self._scratch = scratch
        self._known: dict[tuple[int, Call], int] = {}

    def sizes(self, calls: Iterable[Call], threads: int) -> dict[Call, int]:
        """Returns the bytes of each of `calls` with `threads` threads; calls too large to try are left out.

        Calls that were not measured yet are run in a process of its own.
        """
        measurable = [call for call in dict.fromkeys(calls) if not call.too_large]
        if not self._scratch:
            return dict.fromkeys(measurable, 0)
        new = tuple(call for call in measurable if (threads, call) not in self._known)
        if new:
            sizes = local("grappe.foresight.kernels:worker", (new, threads), 1, from_training=True)
            for call, size in zip(new, sizes, strict=True):
                self._known[threads, call] = size
        return {call: self._known[threads, call] for call in measurable}


@functools.lru_cache(maxsize=8192)
def seconds(call: Call, threads: int) -> float:
    """Runs a call in this process, with a number of threads; returns the least of its times, 0 if it cannot run."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:  # fake tensors may have a type that kernels do not take
        with torch.no_grad():
            # Its own seconds, where there is one thread: other processes may have this core in turn.
            timer = time.process_time if threads == 1 else time.perf_counter
            return 0.0 if call.too_large else min(timeit.repeat(call.on_ones(), timer=timer, number=1, repeat=REPEATS))
    except (RuntimeError, TypeError, AttributeError, MemoryError):
        return 0.0
    finally:
        torch.set_num_threads(before)


def worker(request: tuple[Sequence[Call], int], process: ProcessRank, rendezvous_folder: Path) -> list[int]:
    """Runs each call twice, with a number of threads; returns the bytes that its second run took beyond its output."""
    calls, threads = request
    torch.set_num_threads(threads)
    # torch's profiler writes to the standard error.
    with redirected(2), tempfile.TemporaryDirectory() as folder:
        kept = []
        cpu = [torch.profiler.ProfilerActivity.CPU]
        profiler = torch.profiler.profile(activities=cpu, profile_memory=True)
        with torch.no_grad(), profiler:
            for number, call in enumerate(calls):
                function, output = call.on_ones(), None
                # In bf16 fake tensors may have a type that kernels do not take.
                with contextlib.suppress(RuntimeError):
                    function()  # oneDNN keeps what it makes for a first call
                    with torch.profiler.record_function(f"kernel {number}"):
                        output = function()
                leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                storages = [leaf.untyped_storage() for leaf in leaves]
                kept.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
                del function, output, leaves, storages
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return [max(0, _peak(events, f"kernel {number}") - size) for number, size in enumerate(kept)]


def _peak(events: Sequence[dict[str, Any]], name: str) -> int:
    spans = [event for event in events if event.get("name") == name and event.get("ph") == "X"]
    if not spans:  # it did not run
        return 0
    start, end = spans[0]["ts"], spans[0]["ts"] + spans[0]["dur"]
    changes = [event for event in events if event.get("name") == "[memory]" and start <= event["ts"] <= end]
    changes.sort(key=lambda event: event["ts"])
    return max(itertools.accumulate((change["args"]["Bytes"] for change in changes), initial=0))


def _size(form: Any) -> int:
    """Computes the bytes of a tensor's memory, from its first number to its last; of anything else 0."""
    if not isinstance(form, Form) or 0 in form.size:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(form.size, form.stride, strict=True))
    return (last + 1) * getattr(torch, form.kind).itemsize


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Form(tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))
    return tuple(_described(element) for element in value) if isinstance(value, list | tuple) else value


def _real(value: Any) -> Any:
    if isinstance(value, Form):
        made = torch.empty_strided(value.size, value.stride, dtype=getattr(torch, value.kind))
        return made.fill_(1) if made.is_floating_point() else made.zero_()
    return [_real(element) for element in value] if isinstance(value, tuple) else value
