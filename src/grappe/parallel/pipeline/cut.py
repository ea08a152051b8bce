"""Cuts a model into stages between units, so that the largest stage has as little work as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from grappe.checkpoint.weights import named_tensors
from grappe.errors import PlanError, TaskError
from grappe.parallel.pipeline.units import pipeline_units
from grappe.private_api.torch import tree_flatten, tree_map
from grappe.task import Call, Task

Cut = tuple[range, ...]
"""The units of each stage."""


def cut(task: Task, model: nn.Module, stages: int, example: Any) -> Cut:
    """Assigns units to `stages`: by the task's `cuts`, else by counted work.

    Args:
        model: the task's model, on the meta device where it can be made there.
        example: inputs of about two samples; None counts parameters alone.

    Raises:
        PlanError: the model has no units, or fewer units than stages; parameters are in no unit or in two.
        TaskError: the task's own cuts are not possible.
    """
    name, units = type(task).__name__, pipeline_units(task, model)
    if not units:
        raise PlanError(
            f"a pipeline of {stages} stages: {name} does not say what its model is made of. Give it units(model), the "
            "blocks in order that are the whole model (`return list(model)` for an nn.Sequential), or use shard="
        )
    if len(units) < stages:
        raise PlanError(
            f"{name} has {len(units)} units, too few for {stages} stages: use pipeline={max(2, len(units))} or less, "
            "or give it smaller units"
        )
    _check_all_held(name, model, units)
    request = task.cuts(stages)
    first = balanced(work(units, example, task.forward), stages) if request is None else list(request)
    if request is not None:
        _check_cuts(name, first, len(units), stages)
    found = tuple(range(a, b) for a, b in zip([0, *first], [*first, len(units)], strict=True))
    _check_nothing_shared(name, model, units, found)
    return found


def work(units: Sequence[nn.Module], example: Any, call: Call) -> list[float]:
    """Computes each unit's cost: floating-point operations of a forward, and the sizes of its parameters and output.

    If the units cannot run without values, the cost is the parameters' size alone.
    """
    held = [float(sum(p.numel() for p in unit.parameters())) for unit in units]
    if example is None:
        return held
    try:
        costs, value = [], _alike(example, units)
        with torch.no_grad():
            for index, (unit, numbers) in enumerate(zip(units, held, strict=True)):
                with FlopCounterMode(display=False) as counter:
                    value = unit(value) if index else call(unit, value)
                given = sum(leaf.numel() for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))
                costs.append(counter.get_total_flops() + numbers + given)
    except (RuntimeError, NotImplementedError):  # it looks at values, which a tensor on meta has not
        return held
    return costs


def _alike(example: Any, units: Sequence[nn.Module]) -> Any:
    """Moves the example to the units' meta device."""
    on_meta = any(tensor.is_meta for unit in units for tensor in named_tensors(unit).values())
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and on_meta else leaf, example)


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Returns the first unit of each stage but the first, such that the largest sum of costs is smallest.

    By dynamic programming over (stages, units).
    """
    count, sums = len(costs), [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {last: (sums[last], ()) for last in range(1, count + 1)}
    for number in range(1, stages):
        best = {
            last: min(
                (max(before, sums[last] - sums[first]), (*cuts, first))
                for first, (before, cuts) in best.items()
                if number <= first < last
            )
            for last in range(number + 1, count + 1)
        }
    return list(best[count][1])


def _check_cuts(name: str, first: Sequence[int], units: int, stages: int) -> None:
    whole = all(isinstance(number, int) for number in first)
    inside = whole and all(a < b for a, b in zip([0, *first], [*first, units], strict=True))
    if len(first) != stages - 1 or not inside:
        raise TaskError(
            f"{name}.cuts({stages}) gave {list(first)}: for {stages} stages of {units} units it must give "
            f"{stages - 1} rising number{'s' if stages > 2 else ''} from 1 to {units - 1}"
        )


def _check_all_held(name: str, model: nn.Module, units: Sequence[nn.Module]) -> None:
    held = {id(tensor) for unit in units for tensor in named_tensors(unit).values()}
    loose = [full for full, tensor in named_tensors(model).items() if id(tensor) not in held]
    if loose:
        raise PlanError(
            f"{name}.units() are not the whole model, as a pipeline needs: "
            f"{', '.join(loose[:5])} {'are' if len(loose) > 1 else 'is'} in none of them"
        )


def _check_nothing_shared(name: str, model: nn.Module, units: Sequence[nn.Module], found: Cut) -> None:
    names = {id(tensor): full for full, tensor in named_tensors(model).items()}
    homes: dict[int, int] = {}
    for number, part in enumerate(found):
        for unit in part:
            for tensor in named_tensors(units[unit]).values():
                home = homes.setdefault(id(tensor), number)
                if home != number:
                    raise PlanError(
                        f"{name}: {names[id(tensor)]} is shared by stages {home + 1} and {number + 1}, and a pipeline "
                        "has each parameter on one process: give each its own, cut elsewhere (cuts()), or use shard="
                    )
