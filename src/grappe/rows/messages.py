"""Messages between the processes that share rows: parts gathered, terms summed; and the check that all are in step."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grappe.errors import GrappeError
from grappe.private_api.torch import default_store
from grappe.rows.context import NOW
from grappe.rows.exchange import refused
from grappe.rows.layout import Placement

_HEADER = 16
"""Bytes in front of a process's part: a hash of what it has computed so far, and the message's number."""
_SMALL = 4096
"""Bytes up to which terms are gathered and added up by each process: the message is checked then."""
_PATIENCE_SECONDS = 5.0


class ProcessAstray(GrappeError):
    """A process computes something else than the others."""


def gather(local: Tensor, placement: Placement) -> Tensor:
    """Returns all rows from each process's own, contiguous and equal on all processes."""
    if not NOW.context.gathers:
        raise refused(operator_that_runs())
    dim, (sizes, outer) = placement.dim, placement[1:]
    if local.is_meta:  # torch asks so for the shape of a sum with a zero that has no memory
        return local.new_empty((*local.shape[:dim], outer * placement.total, *local.shape[dim + 1 :]))
    rows = local.unflatten(dim, (outer, placement.rows)).movedim(dim + 1, 0)
    shape = rows.shape[1:]
    width = shape.numel() * rows.element_size()
    parts = _exchange(_bytes(rows), [size * width for size in sizes], "gather")
    flat = torch.cat(parts) if len(parts) > 1 else parts[0]
    every = flat.view(local.dtype).view(placement.total, *shape).movedim(0, dim + 1)
    return every.flatten(dim, dim + 1).contiguous()


def operator_that_runs() -> str:
    """Returns the name of the outermost operator that met rows and runs now."""
    name = "reading a tensor's numbers"
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == "__torch_dispatch__" and "operator" in frame.f_locals:
            name = str(frame.f_locals["operator"]).removeprefix("aten.")
    return name


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    # A single number is contiguous with any stride, which a view of bytes is not.
    flat = flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat.contiguous()
    return flat.view(torch.uint8)


def _exchange(own: Tensor, sizes: Sequence[int], purpose: str) -> list[Tensor]:
    """Returns each process's bytes; all have said what they computed so far, and it was the same."""
    now = NOW.context
    if now.size == 1 or now.pretended:
        return [own[:size] for size in sizes]
    header = torch.tensor((now.trace, now.messages)).view(torch.uint8)
    # Numbers of any type begin at multiples of 16.
    padding = own.new_empty(-(-max(sizes) // 16) * 16 - len(own))
    sent = torch.cat((header.to(own.device, non_blocking=True), own, padding))
    if sent.device.type != "cpu" and dist.get_backend(now.group) == "gloo":  # which gathers from the CPU's memory only
        sent = sent.cpu()
    got = sent.new_empty((now.size, len(sent)))
    parts = got.unbind()
    _send(lambda: dist.all_gather(list(parts), sent, group=now.group), len(sent), purpose)
    if sent.device.type == "cpu":  # elsewhere it would wait for the device
        traces = [tuple(part[:_HEADER].view(torch.int64).tolist()) for part in parts]
        if any(trace != traces[0] for trace in traces):
            lines: list[Any] = [None] * now.size
            dist.all_gather_object(lines, now.line(), group=now.group)
            _raise_astray(dict(enumerate(lines)), traces)
    return [part[_HEADER : _HEADER + size].to(own.device) for part, size in zip(parts, sizes, strict=True)]


def check_in_step() -> None:
    """Checks that all processes have computed the same so far. Collective.

    Its message is as long as that of a number that is read: a process that reads one alone is named.

    Raises:
        ProcessAstray: they have not.
    """
    _exchange(torch.zeros(_HEADER, dtype=torch.uint8), [_HEADER] * NOW.context.size, "check")


_REMEDY = (
    "All must take the same branches and make the same calls: take what differs (time, the process's number, the "
    "order of a set) from one process"
)


def _raise_astray(lines: dict[int, str], traces: list[Any] | None = None) -> None:
    places = "; ".join(f"process {rank} is at {line}" for rank, line in sorted(lines.items()))
    if traces is None:
        raise ProcessAstray(f"processes wait for different messages: {places}. {_REMEDY}")
    usual = max(set(traces), key=traces.count)
    astray = next(rank for rank in lines if traces[rank] != usual)
    raise ProcessAstray(f"process {astray} has computed something else than others: {places}. {_REMEDY}")


def _send(message: Callable[[], Any], size: int, purpose: str) -> None:
    """Runs a message; one that fails, as processes wait for different ones, names their lines."""
    now = NOW.context
    if now.pretended:
        return
    thread = threading.current_thread()
    if thread is not now.thread and not thread.name.startswith("Dummy"):  # as torch's own, of backward, are named
        raise GrappeError(f"{now.line()}: a thread of the script reads rows of the batch: read them in the main thread")
    now.sent[purpose] += size * (now.size - 1)
    now.messages += 1
    try:
        message()
    except RuntimeError as error:
        lines = _lines_of_all(now.line())
        if len(set(lines.values())) > 1:
            _raise_astray(lines)
        raise error


def _lines_of_all(line: str) -> dict[int, str]:
    """Returns the line of each process that also failed, which they write into torch's store."""
    now, store = NOW.context, default_store()
    store.set(f"grappe/rows/astray/{now.rank}", f"{line} (message {now.messages})")
    lines = {}
    for rank in range(now.size):
        try:
            store.wait([f"grappe/rows/astray/{rank}"], timedelta(seconds=_PATIENCE_SECONDS))
        except RuntimeError:
            continue
        lines[rank] = store.get(f"grappe/rows/astray/{rank}").decode()
    return lines


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def summed(local: Tensor, operation: str = "sum") -> Tensor:
    """Returns the sum over the processes, or their "min" or "max": a new tensor, the same bits on all of them."""
    dtype = local.dtype
    if local.is_meta:
        return local
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.int64}.get(dtype, dtype)
    total = local.to(wide).resolve_conj().resolve_neg().contiguous()
    if NOW.context.exchanges:
        total = total.clone() if total is local else total
        now = NOW.context
        now.note("sums", [total.nbytes])
        dist.all_reduce(total, _OPERATIONS[operation], group=now.group)
    elif total.numel() and (operation != "sum" or total.nbytes <= _SMALL):  # other libraries' max may lose a NaN
        parts = _exchange(_bytes(total), [total.nbytes] * NOW.context.size, "reduce")
        join = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}[operation]
        total = functools.reduce(join, (part.view(wide) for part in parts)).view(total.shape)
    elif total.numel() and NOW.context.size > 1:
        total = total.clone() if total.data_ptr() == local.data_ptr() else total
        of = torch.view_as_real(total) if total.is_complex() else total
        _send(lambda: dist.all_reduce(of, group=NOW.context.group), total.nbytes, "reduce")
    return total.to(dtype)


def own_part(tensor: Tensor, placement: Placement) -> Tensor:
    """Returns this process's part of a plain tensor of all rows; a view where it can be."""
    dim, sizes, outer = placement
    first, rows = sum(sizes[: NOW.context.rank]), placement.rows
    if outer == 1:
        return tensor.narrow(dim, first, rows)
    parts = tensor.unflatten(dim, (outer, placement.total))
    return parts.narrow(dim + 1, first, rows).flatten(dim, dim + 1)
