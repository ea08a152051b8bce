"""GradientSums: sums the terms of gradients over the processes, in buckets that are sent while a backward runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.private_api.torch import gradient_hooks
from grappe.rows.context import NOW
from grappe.rows.layout import PARTIAL
from grappe.rows.tensor import Rows, full, local_rows

FIRST_BYTES, BYTES = 1 << 20, 25 << 20
"""Bytes of the first bucket of a backward and of the others, as in DistributedDataParallel."""
Kind = tuple[torch.dtype, torch.device]


class _SentTerms(NamedTuple):
    parameters: list[Tensor]
    terms: list[Tensor]
    versions: list[int]
    """Writes to each term before it was sent: the version of its tensor stays, as rows are below autograd."""
    total: Tensor
    work: Any


class GradientSums:
    """The sums of parameters' gradients over the processes of the active context.

    Args:
        first: bytes of the first bucket of a backward.
        most: bytes of the others.
    """

    def __init__(self, first: int = FIRST_BYTES, most: int = BYTES) -> None:
        self._first, self._most = first, most
        self._waiting = defaultdict[Kind, list[Tensor]](list)
        self._bytes = Counter[Kind]()
        """Bytes of the gradients that wait."""
        self._buckets: list[_SentTerms] = []
        self._is_running = False

    def backward(self, parameters: Sequence[Tensor], run: Callable[[], None]) -> None:
        """Runs a backward; afterwards the parameters' gradients are plain tensors, of all rows.

        Gradients of a backward with create_graph are part of a graph, and stay rows. Collective.
        """
        before: dict[int, Tensor] = {}
        for each in parameters:
            hooks = gradient_hooks(each)[1]
            if not hooks and type(each) in (Tensor, nn.Parameter) and each.is_leaf and each.requires_grad:
                each.register_post_accumulate_grad_hook(self._ready)
                hooks = [self._ready]
            old = each.grad
            # The backward adds a term of a sum: it is summed by itself, before it is added to an old gradient.
            if type(old) is Tensor and not old.requires_grad and hooks == [self._ready]:
                before[id(each)], each.grad = old, None
        self._is_running = True
        try:
            run()
        finally:
            self._is_running = False
            self._finish(parameters)
            for each in parameters:
                old = before.get(id(each))
                if old is not None:
                    each.grad = old if each.grad is None else old.add_(each.grad)

    def _ready(self, parameter: Tensor) -> None:
        """Sends a bucket once it is full."""
        grad: Any = parameter.grad
        # A hook of the script may change the gradient after this one.
        if not self._is_running or not _is_term(grad) or len(gradient_hooks(parameter)[1]) > 1:
            return
        kind = grad.dtype, grad.device
        self._waiting[kind].append(parameter)
        self._bytes[kind] += local_rows(grad).nbytes
        if self._bytes[kind] >= (self._most if self._buckets else self._first):
            self._send(self._waiting.pop(kind))
            del self._bytes[kind]

    def _send(self, parameters: Iterable[Tensor]) -> None:
        parameters = list({id(each): each for each in parameters}.values())
        terms = [local_rows(each.grad) for each in parameters]
        wide = torch.promote_types(terms[0].dtype, torch.float32)
        total = torch.cat([each.reshape(-1) for each in terms]).to(wide)
        NOW.context.sent["gradients"] += total.nbytes
        work = dist.all_reduce(total, group=NOW.context.group, async_op=True)
        versions = [each.grad._cell.shares().version for each in parameters]  # type: ignore[union-attr]
        self._buckets.append(_SentTerms(parameters, terms, versions, total, work))

    def _finish(self, parameters: Sequence[Tensor]) -> None:
        """Puts the sums in place of the terms, and sums those that were not sent, or were written to since."""
        self._waiting.clear()
        self._bytes.clear()
        self._take()
        left = defaultdict[Kind, list[Tensor]](list)
        for each in parameters:
            if type(each.grad) is not Rows or each.grad.requires_grad:
                continue
            if _is_term(each.grad):
                left[each.grad.dtype, each.grad.device].append(each)
            else:
                each.grad = full(each.grad)
        for waiting in left.values():
            self._send(waiting)
        self._take()

    def _take(self) -> None:
        for bucket in self._buckets:
            bucket.work.wait()
            pieces = bucket.total.to(bucket.terms[0].dtype).split([each.numel() for each in bucket.terms])
            for each, term, version, piece in zip(*bucket[:3], pieces, strict=True):
                if not _is_term(each.grad):
                    continue
                cell = each.grad._cell  # type: ignore[union-attr]
                if cell.local is term and cell.family.version == version:
                    made = piece.view(term.shape)
                    each.grad = made if term.is_contiguous() else torch.empty_like(term).copy_(made)
        self._buckets.clear()


def _is_term(grad: Any) -> bool:
    return type(grad) is Rows and grad._cell.layout.placement is PARTIAL and not grad.requires_grad
