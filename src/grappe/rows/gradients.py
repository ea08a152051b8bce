"""GradientSums: sums the terms of gradients over the processes, in buckets that are sent while a backward runs.

A parameter that a module's function takes with own rows has a twin there: the same memory, as a leaf of its own, whose
gradient is this process's term. So no Python runs in its backward but what sends it.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.private_api.torch import accumulate_gradient, gradient_hooks, is_hooked
from grappe.rows.context import NOW
from grappe.rows.layout import PARTIAL
from grappe.rows.own import FromLocal
from grappe.rows.tensor import Rows, full, local_rows

FIRST_BYTES, BYTES = 1 << 20, 25 << 20
"""Bytes of the first bucket of a backward and of the others, as in DistributedDataParallel."""
Kind = tuple[torch.dtype, torch.device]


class _Term(NamedTuple):
    parameter: Tensor
    local: Tensor
    version: int | None
    """Writes to it so far: the version of its tensor stays, as rows are below autograd. None: a twin's gradient."""


_NO_TWIN: Any = (lambda: None, None)


class GradientSums:
    """The sums of parameters' gradients over the processes of the active context.

    Args:
        first: bytes of the first bucket of a backward.
        most: bytes of the others.
    """

    def __init__(self, first: int = FIRST_BYTES, most: int = BYTES) -> None:
        self._first, self._most = first, most
        self._waiting = defaultdict[Kind, list[_Term]](list)
        self._bytes = Counter[Kind]()
        """Bytes of the gradients that wait."""
        self._buckets: list[tuple[list[_Term], Tensor, dist.Work]] = []
        self._twins: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._own_hook = self._ready
        self._is_running = False

    def twin(self, parameter: Tensor) -> Tensor | None:
        """Returns the leaf that stands for a parameter where own rows are; None: it is no leaf, or has hooks."""
        if is_hooked(parameter, self._own_hook):
            return None
        key = id(parameter)
        owner, made = self._twins.get(key, _NO_TWIN)
        if owner() is parameter and made.data_ptr() == parameter.data_ptr() and made.dtype is parameter.dtype:
            return made
        if not parameter.is_leaf:
            return None
        made = parameter.detach().requires_grad_()
        owner = weakref.ref(parameter, lambda _: self._twins.pop(key, None))
        made.register_post_accumulate_grad_hook(functools.partial(self._twin_ready, owner))
        self._twins[key] = owner, made
        return made

    def twins(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns the twin that each tensor has so far."""
        made = [self._twins.get(id(each)) for each in parameters]
        return [each[1] if each and each[0]() is own else None for each, own in zip(made, parameters, strict=True)]

    def backward(self, parameters: Sequence[Tensor], run: Callable[[], None]) -> None:
        """Runs a backward; afterwards the parameters' gradients are plain tensors, of all rows.

        Gradients of a backward with create_graph are part of a graph, and stay rows. Collective.
        """
        before: dict[int, Tensor] = {}
        for each in parameters:
            hooks = gradient_hooks(each)[1]
            if not hooks and type(each) in (Tensor, nn.Parameter) and each.is_leaf and each.requires_grad:
                each.register_post_accumulate_grad_hook(self._own_hook)
                hooks = [self._ready]
            old = each.grad
            # The backward adds a term of a sum: it is summed by itself, before it is added to an old gradient.
            if type(old) is Tensor and not old.requires_grad and hooks == [self._ready]:
                before[id(each)], each.grad = old, None
        self._is_running = True
        try:
            run()
        finally:
            self._is_running = NOW.context.is_watched = False
            self._finish(parameters)
            for each in parameters:
                old = before.get(id(each))
                if old is not None:
                    each.grad = old if each.grad is None else old.add_(each.grad)

    def _ready(self, parameter: Tensor) -> None:
        grad: Any = parameter.grad
        # A hook of the script may change the gradient after this one.
        if self._is_running and _is_term(grad) and len(gradient_hooks(parameter)[1]) == 1:
            self._wait(_term(parameter))

    def _twin_ready(self, owner: weakref.ref[Tensor], twin: Tensor) -> None:
        parameter, term = owner(), twin.grad
        twin.grad = None
        if parameter is None or term is None:
            return
        if self._is_running and not (
            term.requires_grad or NOW.context.is_watched or is_hooked(parameter, self._own_hook)
        ):
            self._wait(_Term(parameter, term, None))
        else:  # it arrives as if the parameter itself had been there, hooks and all
            accumulate_gradient(parameter, FromLocal.apply(term, PARTIAL), create_graph=term.requires_grad)

    def _wait(self, term: _Term) -> None:
        """Sends a bucket once it is full."""
        kind = term.local.dtype, term.local.device
        self._waiting[kind].append(term)
        self._bytes[kind] += term.local.nbytes
        if self._bytes[kind] >= (self._most if self._buckets else self._first):
            self._send(self._waiting.pop(kind))
            del self._bytes[kind]

    def _send(self, terms: list[_Term]) -> None:
        wide = torch.promote_types(terms[0].local.dtype, torch.float32)
        total = torch.cat([each.local.reshape(-1) for each in terms]).to(wide)
        NOW.context.sent["gradients"] += total.nbytes
        work = dist.all_reduce(total, group=NOW.context.group, async_op=True)
        self._buckets.append((terms, total, work))

    def _finish(self, parameters: Sequence[Tensor]) -> None:
        """Puts the sums in place of the terms, and sums those that were not sent, or were written to since."""
        waiting = [each for terms in self._waiting.values() for each in terms if each.version is None]
        self._waiting.clear()
        self._bytes.clear()
        of_twins = self._take()
        for each in parameters:
            if type(each.grad) is not Rows or each.grad.requires_grad:
                continue
            if _is_term(each.grad):
                waiting.append(_term(each))
            else:
                each.grad = full(each.grad)
        left = defaultdict[Kind, list[_Term]](list)
        for term in waiting:
            left[term.local.dtype, term.local.device].append(term)
        for terms in left.values():
            self._send(terms)
        for parameter, sum_of_rows in of_twins + self._take():
            old = parameter.grad
            parameter.grad = sum_of_rows if old is None else old + sum_of_rows

    def _take(self) -> list[tuple[Tensor, Tensor]]:
        """Puts sums in place of terms; returns those of twins, by parameter."""
        of_twins = []
        for terms, total, work in self._buckets:
            work.wait()
            pieces = total.to(terms[0].local.dtype).split([each.local.numel() for each in terms])
            for (parameter, term, version), piece in zip(terms, pieces, strict=True):
                made = piece.view(term.shape)
                made = made if term.is_contiguous() else torch.empty_like(term).copy_(made)
                if version is None:
                    of_twins.append((parameter, made))
                elif _is_term(parameter.grad):
                    cell = parameter.grad._cell  # type: ignore[union-attr]
                    if cell.local is term and cell.family.version == version:
                        parameter.grad = made
        self._buckets.clear()
        return of_twins


def _term(parameter: Tensor) -> _Term:
    cell = parameter.grad._cell  # type: ignore[union-attr]
    return _Term(parameter, local_rows(parameter.grad), cell.shares().version)


def _is_term(grad: Any) -> bool:
    return type(grad) is Rows and grad._cell.layout.placement is PARTIAL and not grad.requires_grad
