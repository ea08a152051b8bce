"""Replaces what takes a module's rows without a function of torch: it gets rows, or a parameter's twin, instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from grappe.errors import GrappeError
from grappe.private_api.torch import TRANSFORM_ENTRIES, tree_map
from grappe.rows import functions  # noqa: F401  # it fills the table
from grappe.rows.context import NOW
from grappe.rows.gradients import GradientSums
from grappe.rows.layout import PARTIAL
from grappe.rows.own import FromLocal, OwnRows, as_rows, made_of


def entries(sums: GradientSums) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Attributes of torch to replace, each with its replacement's maker: (owner, name, made).

    A module's rows become rows there, where a user's Function, torch.func or a gradient takes them.
    """
    return [
        (Function, "apply", _applying),
        (saved_tensors_hooks, "__init__", _hooking),
        (torch.jit.ScriptFunction, "__call__", _with_rows),
        (torch.autograd, "grad", lambda plain: _with_twins(plain, sums)),
        (torch.autograd, "backward", lambda plain: _with_inputs(plain, sums)),
        *((owner, name, _with_rows) for owner, name in TRANSFORM_ENTRIES),
    ]


def _applying(plain: Any) -> Any:
    def apply(cls: type[Function], *arguments: Any, **options: Any) -> Any:
        options = {name: as_rows(each) for name, each in options.items()}
        return plain.__func__(cls, *map(as_rows, arguments), **options)

    return classmethod(apply)


def _with_rows(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        arguments, options = tree_map(as_rows, (arguments, options))
        return plain(*arguments, **options)

    return call


def _hooking(plain: Callable[..., None]) -> Callable[..., None]:
    """Refuses hooks of a module's own on what autograd saves, which would get own parts; torch's, and ours, may."""

    def init(self: Any, pack: Any, unpack: Any) -> None:
        if NOW.context.within and not getattr(pack, "__module__", "").startswith(("torch.", "grappe.")):
            raise GrappeError(
                f"saved_tensors_hooks within a module ({NOW.context.line()}): put them around the module's call"
            )
        plain(self, pack, unpack)

    return init


def _in_graphs(tensors: Any, sums: GradientSums) -> tuple[list[Any], list[Any]]:
    """Returns, for tensors whose gradients are asked for, those of torch's graph, and the twins that are in it."""
    graph = [made_of(each) for each in tensors]
    twins = sums.twins(graph)
    for at, each in enumerate(graph):
        if type(each) is OwnRows:
            graph[at] = each._local if each._memory.source is None else each._memory.source
    return graph, twins


def _with_inputs(plain: Callable[..., None], sums: GradientSums) -> Callable[..., None]:
    def backward(tensors: Any, grad_tensors: Any = None, *rest: Any, inputs: Any = None, **options: Any) -> None:
        tensors, grad_tensors = tree_map(as_rows, (tensors, grad_tensors))
        if inputs is not None:
            graph, twins = _in_graphs([inputs] if isinstance(inputs, Tensor) else list(inputs), sums)
            options["inputs"] = [*graph, *(each for each in twins if each is not None)]
        plain(tensors, grad_tensors, *rest, **options)

    return backward


_GRAD = inspect.signature(torch.autograd.grad)


def _with_twins(plain: Callable[..., Any], sums: GradientSums) -> Callable[..., Any]:
    def grad(*arguments: Any, **options: Any) -> Any:
        bound = _GRAD.bind(*arguments, **options)
        bound.apply_defaults()
        named = bound.arguments
        inputs = named["inputs"]
        if isinstance(inputs, Mapping):  # by name, since torch 2.13
            return dict(zip(inputs, grad(**named | {"inputs": [*inputs.values()]}), strict=True))
        asked = [made_of(each) for each in ([inputs] if isinstance(inputs, Tensor) else inputs)]
        named["outputs"], named["grad_outputs"] = tree_map(as_rows, (named["outputs"], named["grad_outputs"]))
        graph, twins = _in_graphs(asked, sums) if all(isinstance(each, Tensor) for each in asked) else (asked, [])
        added = [each for each in twins if each is not None]
        if not added and all(a is b for a, b in zip(asked, graph, strict=True)):
            return plain(**named)
        made = plain(**named | {"inputs": [*graph, *added], "allow_unused": True, "materialize_grads": False})
        terms = iter(made[len(asked) :])
        results = []
        for value, own, twin, gradient in zip(asked, graph, twins, made, strict=False):
            result = gradient
            if result is not None and type(value) is OwnRows and own is value._local:
                result = FromLocal.apply(result, value._place)
            term = None if twin is None else next(terms)
            if term is not None:
                rows = FromLocal.apply(term, PARTIAL)
                result = rows if result is None else result + rows
            if result is None and named["materialize_grads"]:
                result = torch.zeros_like(as_rows(value))
            elif result is None and not named["allow_unused"]:
                raise RuntimeError(  # torch's text
                    "One of the differentiated Tensors appears to not have been used in the graph. Set "
                    "allow_unused=True if this is the desired behavior."
                )
            results.append(result)
        return tuple(results)

    return grad
