"""Finds repeated blocks of a model, to be its units where the task gives none: sharded and recomputed one by one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grappe.parallel.materialise import on_meta
from grappe.plan import Plan
from grappe.private_api.torch import tree_flatten, tree_leaves, tree_map, tree_unflatten
from grappe.task import Task, overrides


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Units of a model whose task gives none."""

    names: tuple[str, ...] = ()
    """Names of the modules; empty if the task gives units, or no blocks could be units."""
    ungrouped: int = 0
    """Bytes of the parameters of a model without any units; 0: it has some."""


def blocks_for(task: Task, plan: Plan, example: Any, kept: Sequence[str] = ()) -> Blocks:
    """Finds the units of a plan that needs some, where the task gives none; for a pipeline it has to give them.

    Args:
        example: inputs of one or two samples, on the CPU.
        kept: the names that the run has been trained with so far.
    """
    needed = plan.pipeline == 1 and (plan.uses_fsdp or plan.recompute)
    return blocks_of(task, example, kept) if needed else Blocks()


def blocks_of(task: Task, example: Any, kept: Sequence[str] = ()) -> Blocks:
    """Finds the blocks, on a model of its own; else as `blocks_for`."""
    if overrides(task, "units"):
        return Blocks()
    model = on_meta(task)
    if task.units(model):
        return Blocks()
    modules = dict(model.named_modules())
    names = tuple(kept) if kept and set(kept) <= set(modules) else _usable(task, model, repeated_blocks(model), example)
    size = sum(parameter.nbytes for parameter in model.parameters())
    return Blocks(names=names, ungrouped=0 if names else size)


def units_of(task: Task, model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Returns the modules of these names; without names, the units that the task gives."""
    return [model.get_submodule(name) for name in names] or list(task.units(model))


def repeated_blocks(module: nn.Module, prefix: str = "") -> list[str]:
    """Lists the names of modules of one class in a list or sequence; of nested ones, the outermost that has a class."""
    children = dict(module.named_children())
    classes = Counter(type(child) for child in children.values())
    names = []
    for key, child in children.items():
        is_block = (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and classes[type(child)] > 1
            and not isinstance(child, nn.ModuleList | nn.ModuleDict)  # which nobody calls
            and next(child.parameters(), None) is not None
            and (len(classes) == 1 or any(True for _ in child.children()))  # no layer among others: Linear, ReLU, …
        )
        inside = [] if is_block and type(child) is not nn.Sequential else repeated_blocks(child, f"{prefix}{key}.")
        names += inside or [f"{prefix}{key}"] * is_block
    return names


def _usable(task: Task, model: nn.Module, names: Sequence[str], example: Any) -> tuple[str, ...]:
    """Returns those of `names` that can be units: FSDP2 gathers a unit when it is called, and at no other time.

    So a forward calls it once, with values that it does not change in place, uses its parameters nowhere else, and gets
    tensors from it. A forward that depends on values may call another module in each process, which would then wait for
    each other: it fails here, on the meta device, and no module is a unit.
    """
    if not names:
        return ()
    watch = _Calls(model, names)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    place = torch.device("meta") if is_meta else contextlib.nullcontext()
    inputs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and is_meta else leaf, example)
    try:
        with torch.random.fork_rng(devices=[]), place, watch:
            task.forward(model.train(), inputs)
    except Exception:  # of any kind: the code is the user's, and the training itself shows its errors
        return ()
    return tuple(name for name in names if watch.calls[name] == 1 and name not in watch.misused)


class _Calls(TorchFunctionMode):
    """Context that counts the calls of modules, and sees those that are used in another way than by a call."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.calls, self.misused, self._inside = Counter[str](), set[str](), ""
        self._homes = {}
        for name in names:
            module = model.get_submodule(name)
            self._homes |= {id(parameter): name for parameter in module.parameters()}
            module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
            module.register_forward_hook(self._leaving(name))

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, further: Any) -> Any:
            self.calls[name] += 1
            self._inside = name
            leaves, form = tree_flatten((args, further))
            places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if places:
                for number, passed in zip(places, _Passed.apply(*(leaves[number] for number in places)), strict=True):
                    leaves[number] = passed
            return tree_unflatten(leaves, form)

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._inside = ""
            if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
                self.misused.add(name)

        return leave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            homes = {self._homes.get(id(leaf), "") for leaf in tree_leaves((args, kwargs))}
            self.misused |= homes - {"", self._inside}
        return result


class _Passed(torch.autograd.Function):
    """Identity of several tensors; as FSDP2's, it allows no change of them in place."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients
