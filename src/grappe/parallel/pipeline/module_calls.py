"""Module calls: which calls of a model's modules get which others' outputs, as autograd's graph has it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grappe.private_api.torch import tree_leaves

CallKey = tuple[nn.Module, int]
"""A module, and the number of its call."""
Sources = Mapping[CallKey, frozenset[CallKey]]
"""By call: those whose outputs it gets, directly or through operators between them."""


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[dict[CallKey, frozenset[CallKey]]]:
    """Context in which calls of modules with parameters of their own are recorded, into the mapping that it yields.

    Calls without a gradient are nobody's sources.
    """
    calls: dict[CallKey, frozenset[CallKey]] = {}
    counts, made = Counter[nn.Module](), dict[Any, CallKey]()  # by autograd node: the call that returned it

    def enters(module: nn.Module, inputs: Any, keywords: Any) -> None:
        calls[module, counts[module]] = _sources((inputs, keywords), made)
        counts[module] += 1

    def leaves(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _with_history(output):
            made[tensor.grad_fn] = module, counts[module] - 1

    hooks = []
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            hooks += [
                module.register_forward_pre_hook(enters, with_kwargs=True),
                module.register_forward_hook(leaves),
            ]
    try:
        with torch.enable_grad():
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


def agree(one: Sources, other: Sources) -> bool:
    """Returns whether two runs call their modules as often, each with the outputs of the same calls.

    A module that only one of both calls says nothing: its parameters may be used without a call.
    """
    both = {module for module, _ in one} & {module for module, _ in other}
    return _of(one, both) == _of(other, both)


def _of(calls: Sources, modules: set[nn.Module]) -> Sources:
    """Returns the calls of `modules` alone; the sources of calls that are left out take those calls' place."""
    found: dict[CallKey, frozenset[CallKey]] = {}
    for key, sources in calls.items():  # sources come before
        parts = [{one} if one[0] in modules else found[one] for one in sources]
        found[key] = frozenset().union(*parts)
    return {key: sources for key, sources in found.items() if key[0] in modules}


def _sources(values: Any, made: Mapping[Any, CallKey]) -> frozenset[CallKey]:
    found: set[CallKey] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in _with_history(values)]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node in made:
            found.add(made[node])
        elif node not in seen:
            seen.add(node)
            waiting += [one for one, _ in node.next_functions if one is not None]
    return frozenset(found)


def _with_history(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor) and one.grad_fn is not None]
