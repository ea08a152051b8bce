"""Cuts a model into stages between units, and checks that the units in sequence compute what the model does."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from grappe.checkpoint.weights import named_tensors
from grappe.errors import PlanError, TaskError, user_code
from grappe.parallel.pipeline.units import pipeline_units
from grappe.private_api.torch import tree_flatten, tree_leaves, tree_map
from grappe.task import Call, Task

Cut = tuple[range, ...]
"""The units of each stage."""


def cut_into_stages(task: Task, model: nn.Module, stages: int, example: Any) -> Cut:
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
            f"a pipeline of {stages} stages: {name} has no units(model). Define it to return the "
            "blocks that make up the whole model, in order (`return list(model)` for an nn.Sequential), or use shard="
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
    parts = tuple(range(a, b) for a, b in zip([0, *first], [*first, len(units)], strict=True))
    _check_nothing_shared(name, model, units, parts)
    return parts


def work(units: Sequence[nn.Module], example: Any, call: Call) -> list[float]:
    """Computes each unit's cost: floating-point operations of a forward, and the sizes of its parameters and output.

    If the units cannot run without values, the cost is the parameters' size alone.
    """
    held = [float(sum(p.numel() for p in unit.parameters())) for unit in units]
    if example is None:
        return held
    try:
        costs, value = [], _on_meta(example, units)
        with torch.no_grad():
            for index, (unit, numbers) in enumerate(zip(units, held, strict=True)):
                with FlopCounterMode(display=False) as counter:
                    value = unit(value) if index else call(unit, value)
                returned = sum(leaf.numel() for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))
                costs.append(counter.get_total_flops() + numbers + returned)
    except (RuntimeError, NotImplementedError):  # it reads values, which a meta tensor does not have
        return held
    return costs


def _on_meta(example: Any, units: Sequence[nn.Module]) -> Any:
    """Moves the example to the units' meta device."""
    is_meta = any(tensor.is_meta for unit in units for tensor in named_tensors(unit).values())
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and is_meta else leaf, example)


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
    bounds = [0, *first, units]
    rising = all(isinstance(bound, int) for bound in bounds) and all(a < b for a, b in pairwise(bounds))
    if len(first) != stages - 1 or not rising:
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


def _check_nothing_shared(name: str, model: nn.Module, units: Sequence[nn.Module], parts: Cut) -> None:
    names = {id(tensor): full for full, tensor in named_tensors(model).items()}
    homes: dict[int, int] = {}
    for number, part in enumerate(parts):
        for unit in part:
            for tensor in named_tensors(units[unit]).values():
                home = homes.setdefault(id(tensor), number)
                if home != number:
                    raise PlanError(
                        f"{name}: {names[id(tensor)]} is shared by stages {home + 1} and {number + 1}, and a pipeline "
                        "has each parameter on one process: give each its own, cut elsewhere (cuts()), or use shard="
                    )


TOLERANCE = 1e-4  # relative: the same operations in the same order give the same bits, or nearly


@torch.no_grad()
def check_units(task: Task, example: Any) -> None:
    """Runs the model, then its units in sequence, with the same dropout.

    Raises:
        PlanError: the outputs differ.
    """
    torch.set_num_threads(1)  # in a forked process
    torch.manual_seed(task.seed)
    model = task.model().train()
    units = pipeline_units(task, model)  # which may switch off additional outputs of the model
    torch.manual_seed(1)
    expected = task.forward(model, example)
    torch.manual_seed(1)
    if not _alike(expected, _sequence(task, units, example)):
        raise _differ(task)


def check_without_values(task: Task, model: nn.Module, example: Any) -> None:
    """Checks as `check_units`, without values: the outputs' shapes, and which modules get which others' outputs.

    Raises:
        PlanError: they differ.
    """
    units = pipeline_units(task, model)
    with recorded(model) as by_model:
        expected = task.forward(model, example)
    with recorded(model) as by_units:
        output = _sequence(task, units, example)
    if not _alike(expected, output, lambda *_: True) or not agree(by_model, by_units):
        raise _differ(task)


def _sequence(task: Task, units: list[nn.Module], value: Any) -> Any:
    try:
        for number, unit in enumerate(units):
            value = unit(value) if number else task.forward(unit, value)
    except Exception as error:
        raise PlanError(
            f"a pipeline runs {type(task).__name__}.units() one after the other, each on the previous unit's output, "
            f"which fails: {user_code.sentence(error)}. They must be the whole model, in order"
        ) from error
    return value


def _differ(task: Task) -> PlanError:
    return PlanError(
        f"{type(task).__name__}.units(), one after the other, do not compute what the model computes, as a pipeline "
        "needs: put all other work of forward() into a unit"
    )


def _close(a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * float(a.abs().max() or 1.0))


def _alike(expected: Any, output: Any, same: Callable[[Tensor, Tensor], bool] = _close) -> bool:
    ours, theirs = tree_leaves(expected), tree_leaves(output)
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a is not b and a != b:
                return False
        elif a.shape != b.shape or not same(a, b):
            return False
    return True


CallKey = tuple[nn.Module, int]
"""A module, and the number of its call."""
Sources = Mapping[CallKey, frozenset[CallKey]]
"""By call: those whose outputs it gets, directly or through operators between them."""


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[dict[CallKey, frozenset[CallKey]]]:
    """Context in which calls of modules with parameters of their own are recorded, into the mapping that it yields.

    Calls without a gradient are never recorded as sources.
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
            hooks += [module.register_forward_pre_hook(enters, with_kwargs=True), module.register_forward_hook(leaves)]
    try:
        with torch.enable_grad():
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


def agree(first: Sources, second: Sources) -> bool:
    """Returns whether two runs call their modules as often, each with the outputs of the same calls.

    A module that only one of the runs calls is ignored: its parameters may be used without a call.
    """
    both = {module for module, _ in first} & {module for module, _ in second}
    return _of(first, both) == _of(second, both)


def _of(calls: Sources, modules: set[nn.Module]) -> Sources:
    """Returns the calls of `modules` alone; the sources of calls that are left out take those calls' place."""
    kept: dict[CallKey, frozenset[CallKey]] = {}
    for key, sources in calls.items():  # sources come before
        parts = [{source} if source[0] in modules else kept[source] for source in sources]
        kept[key] = frozenset().union(*parts)
    return {key: sources for key, sources in kept.items() if key[0] in modules}


def _sources(values: Any, made: Mapping[Any, CallKey]) -> frozenset[CallKey]:
    sources: set[CallKey] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in _with_history(values)]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node in made:
            sources.add(made[node])
        elif node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return frozenset(sources)


def _with_history(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
