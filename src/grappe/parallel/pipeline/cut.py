"""Cuts a model into stages between units, and checks that the units in sequence compute what the model does.

Units are the task's own, or made of a transformers model that declares the order of its parts. The first one then runs
the model's own forward up to its layers, the last one the same forward after them; between them go the hidden states
and the layers' other arguments: a mask, the positions' embeddings.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from grappe.checkpoint.weights import named_tensors
from grappe.errors import PlanError, TaskError, user_code
from grappe.private_api import transformers
from grappe.private_api.torch import module_children, tree_flatten, tree_leaves, tree_map
from grappe.task import Call, Task, overrides


def pipeline_units(task: Task, model: nn.Module) -> list[nn.Module]:
    """Returns the units that make up the model, in order: the task's, or the modules of an nn.Sequential.

    Raises:
        PlanError: neither task nor model declares them, or a model of transformers does not say in which order its
            parts run.
    """
    models, own = transformers.models(model), overrides(task, "units")
    if own or not models:
        units = list(model) if type(model) is nn.Sequential and not own else list(task.units(model))
        if not units:
            raise PlanError(
                f"a pipeline: {type(task).__name__} has no units(model). Define it to return the blocks that make up "
                "the whole model, in order, or use shard="
            )
        return units
    language_model = next(iter(models.values()))
    order = transformers.pipeline_order(language_model)
    lists = [name for name in order if isinstance(language_model.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1 or len(models) > 1:
        raise PlanError(
            f"a pipeline: {' and '.join(type(each).__name__ for each in models.values())} has no pipeline plan in "
            "transformers: give the task units(model), the blocks in order that are the whole model, or use shard="
        )
    transformers.switch_off_cache(language_model)
    after = order[order.index(lists[0]) + 1 :]
    layers = list(language_model.get_submodule(lists[0]))
    parts = _Parts(model, language_model, lists[0], after)
    return [Before(parts, layers), *(Layer(layer, number) for number, layer in enumerate(layers)), Behind(parts)]


class _Parts:
    """A model of transformers, the names of its layers and of the modules that run after them.

    Args:
        outer: the task's model: `model` itself or a module around it.
    """

    def __init__(self, outer: nn.Module, model: Any, layers: str, after: list[str]) -> None:
        self.outer, self.model, self.layers, self.after = outer, model, layers, after
        place = layers.rpartition(".")[0]
        siblings = [f"{place}.{name}".lstrip(".") for name, _ in model.get_submodule(place).named_children()]
        self.before = [name for name in siblings if name not in (layers, *after)]

    @contextlib.contextmanager
    def replaced(self, by: Mapping[str, nn.Module]) -> Iterator[None]:
        """Context in which modules are replaced, by name; also where they are on another process."""
        kept: list[tuple[dict[str, nn.Module | None], str, nn.Module | None]] = []
        for name, module in by.items():
            place, _, last = name.rpartition(".")
            children = module_children(self.model.get_submodule(place))
            kept.append((children, last, children.get(last)))
            children[last] = module
        try:
            yield
        finally:
            for children, last, before in kept:
                if before is None:
                    del children[last]
                else:
                    children[last] = before


class Before(nn.Module):
    """Runs the model's forward up to its layers: to the hidden states, and the arguments of each layer."""

    def __init__(self, parts: _Parts, layers: list[nn.Module]) -> None:
        super().__init__()
        self._parts = parts
        self.held = nn.ModuleList(parts.model.get_submodule(name) for name in parts.before)
        self._layers = [_Recorder.like(layer) for layer in layers]
        self._is_causal = transformers.has_causal_sdpa(parts.model)  # now: its layers may go to other processes

    def forward(self, *args: Any, **inputs: Any) -> dict[str, Any]:
        parts, nothing = self._parts, {name: nn.Identity() for name in self._parts.after}
        with parts.replaced({parts.layers: nn.ModuleList(self._layers), **nothing}):
            parts.outer(*args, **inputs)
        if inputs.get("attention_mask") is not None:
            self._fill_in_masks()
        groups: dict[tuple[int, ...], tuple[list[str], dict[str, Any]]] = {}
        for number, layer in enumerate(self._layers):
            key = tuple(id(leaf) for leaf in tree_leaves(layer.arguments))
            groups.setdefault(key, ([], layer.arguments))[0].append(str(number))
        packed = {" ".join(numbers): _packed(arguments) for numbers, arguments in groups.values()}
        hidden = self._layers[0].hidden
        for layer in self._layers:
            layer.hidden, layer.arguments = None, {}
        return {"hidden": hidden, "arguments": packed}

    def _fill_in_masks(self) -> None:
        """Gives layers without a mask the causal one: transformers omits it where nothing is padding.

        Stages exchange a fixed set of tensors, whatever the values of a microbatch.
        """
        kinds = getattr(self._parts.model.config, "layer_types", None) or [""] * len(self._layers)
        masks: dict[str, Tensor] = {}
        for layer, kind in zip(self._layers, kinds, strict=True):
            if layer.takes_mask and "attention_mask" not in layer.arguments:
                if not self._is_causal:
                    raise TaskError(
                        "whether a layer has a mask depends on the padding, which a pipeline cannot follow: make the "
                        'model with attn_implementation="sdpa" or "eager"'
                    )
                batch, length = layer.hidden.shape[:2]
                mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device=layer.hidden.device)
                layer.arguments["attention_mask"] = masks.setdefault(kind, mask.tril())


class _Recorder(nn.Module):
    """Stands for a layer: keeps what it is called with, and returns the hidden states as they are."""

    def __init__(self, signature: inspect.Signature) -> None:
        super().__init__()
        self._signature = signature
        self.takes_mask = "attention_mask" in signature.parameters
        self.hidden: Any = None
        self.arguments: dict[str, Any] = {}

    @classmethod
    def like(cls, layer: nn.Module) -> _Recorder:
        """Returns one with the layer's signature and its plain attributes, which a model's forward may look at."""
        made = cls(inspect.signature(layer.forward))
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, str | int | float):
                setattr(made, name, value)
        return made

    def forward(self, *args: Any, **further: Any) -> Any:
        bound = self._signature.bind(*args, **further)
        (_, self.hidden), *others = bound.arguments.items()
        self.arguments = {}
        for name, value in others:
            varied = self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            self.arguments |= value if varied else {name: value}
        self.arguments = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor) or value}
        for name, value in self.arguments.items():
            if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                raise TaskError(f"a layer receives {name}={value!r}, but only tensors pass to the next stage")
        return self.hidden


class Layer(nn.Module):
    """Runs a layer on the hidden states."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.layer, self._number = layer, str(number)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        [arguments] = [packed for numbers, packed in value["arguments"].items() if self._number in numbers.split()]
        hidden = self.layer(value["hidden"], **{name: _unpacked(argument) for name, argument in arguments.items()})
        return {**value, "hidden": hidden if isinstance(hidden, Tensor) else hidden[0]}


class Behind(nn.Module):
    """Runs the model's forward after its layers, to its output."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self._parts = parts
        self.held = nn.ModuleList(parts.model.get_submodule(name) for name in parts.after)

    def forward(self, value: dict[str, Any]) -> Any:
        parts = self._parts
        with parts.replaced({parts.layers: nn.ModuleList(), **{name: _Skipped() for name in parts.before}}):
            return parts.outer(inputs_embeds=value["hidden"])


class _Skipped(nn.Module):
    """Identity that replaces modules that another stage has run."""

    def forward(self, value: Any = None, *_: Any, **__: Any) -> Any:
        return value


def _packed(value: Any) -> Any:
    """Packs tensors without gradient into bytes: for floating-point ones the next stage would send a gradient back."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.requires_grad:
            return {str(value.dtype).removeprefix("torch."): value.contiguous().view(torch.uint8)}
        return value
    if isinstance(value, Mapping):
        return {name: _packed(value[name]) for name in sorted(value)}  # the same order in every microbatch
    return [_packed(item) for item in value]


def _unpacked(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        [(dtype, data)] = value.items()
        return data.view(getattr(torch, dtype))
    return tuple(_unpacked(item) for item in value)


Cut = tuple[range, ...]
"""The units of each stage."""


def cut_into_stages(task: Task, model: nn.Module, stages: int, example: Any) -> Cut:
    """Assigns units to `stages`: by the task's `cuts`, else by counted work.

    Args:
        model: the task's model, on the meta device where it can be made there.
        example: inputs of about two samples; None counts parameters alone.

    Raises:
        PlanError: the model has fewer units than stages; parameters are in no unit or in two.
        TaskError: the task's own cuts are not possible.
    """
    name, units = type(task).__name__, pipeline_units(task, model)
    if len(units) < stages:
        raise PlanError(
            f"{name} has {len(units)} units, too few for {stages} stages: use pipeline={max(2, len(units))} or less, "
            "or give it smaller units"
        )
    held = {id(tensor) for unit in units for tensor in named_tensors(unit).values()}
    loose = [full for full, tensor in named_tensors(model).items() if id(tensor) not in held]
    if loose:
        raise PlanError(
            f"{name}.units() are not the whole model, as a pipeline needs: "
            f"{', '.join(loose[:5])} {'are' if len(loose) > 1 else 'is'} in none of them"
        )
    request = task.cuts(stages)
    first = balanced(work(units, example, task.forward), stages) if request is None else list(request)
    bounds = [0, *first, len(units)]
    rising = all(isinstance(bound, int) for bound in bounds) and all(a < b for a, b in pairwise(bounds))
    if len(first) != stages - 1 or not rising:
        raise TaskError(
            f"{name}.cuts({stages}) gave {list(first)}: for {stages} stages of {len(units)} units it must give "
            f"{stages - 1} rising number{'s' if stages > 2 else ''} from 1 to {len(units) - 1}"
        )
    parts = tuple(range(a, b) for a, b in pairwise(bounds))
    names = {id(tensor): full for full, tensor in named_tensors(model).items()}
    homes: dict[int, int] = {}
    for number, part in enumerate(parts):
        for tensor in (tensor for unit in part for tensor in named_tensors(units[unit]).values()):
            home = homes.setdefault(id(tensor), number)
            if home != number:
                raise PlanError(
                    f"{name}: {names[id(tensor)]} is shared by stages {home + 1} and {number + 1}, and a pipeline "
                    "has each parameter on one process: give each its own, cut elsewhere (cuts()), or use shard="
                )
    return parts


def work(units: Sequence[nn.Module], example: Any, call: Call) -> list[float]:
    """Computes each unit's cost: floating-point operations of a forward, and the sizes of its parameters and output.

    If the units cannot run without values, the cost is the parameters' size alone.
    """
    held = [float(sum(p.numel() for p in unit.parameters())) for unit in units]
    if example is None:
        return held
    try:
        is_meta = any(tensor.is_meta for unit in units for tensor in named_tensors(unit).values())
        to_meta = lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and is_meta else leaf  # noqa: E731
        costs, value = [], tree_map(to_meta, example)
        with torch.no_grad():
            for index, (unit, numbers) in enumerate(zip(units, held, strict=True)):
                with FlopCounterMode(display=False) as counter:
                    value = unit(value) if index else call(unit, value)
                returned = sum(leaf.numel() for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))
                costs.append(counter.get_total_flops() + numbers + returned)
    except (RuntimeError, NotImplementedError):  # it reads values, which a meta tensor does not have
        return held
    return costs


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


TOLERANCE = 1e-4  # relative: the same operations in the same order give the same bits, or nearly


@torch.no_grad()
def check_units(task: Task, example: Any, kind: torch.dtype = torch.float32) -> None:
    """Runs the model, then its units in sequence, with the same dropout.

    Args:
        kind: float64 for a model in float64, as the example is then.

    Raises:
        PlanError: the outputs differ.
    """
    torch.set_num_threads(1)  # in a forked process
    torch.manual_seed(task.seed)
    model = task.model().train()
    if kind == torch.float64:
        model.double()
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
