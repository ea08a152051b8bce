"""Units of a pipeline: the task's own, or made of a transformers model that declares the order of its parts.

The first unit runs the model's own forward up to its layers, the last one the same forward after them; between them
go the hidden states and the layers' other arguments: a mask, the positions' embeddings.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from grappe.errors import PlanError, TaskError
from grappe.private_api import transformers
from grappe.private_api.torch import module_children, tree_leaves
from grappe.task import Task, overrides


def pipeline_units(task: Task, model: nn.Module) -> list[nn.Module]:
    """Returns the units that make up the model, in order; empty if neither task nor model declares them.

    Raises:
        PlanError: a model of transformers does not say in which order its parts run.
    """
    models = transformers.models(model)
    if overrides(task, "units") or not models:
        return list(task.units(model))
    language_model = next(iter(models.values()))
    order = transformers.pipeline_order(language_model)
    lists = [name for name in order if isinstance(language_model.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1 or len(models) > 1:
        raise PlanError(
            f"a pipeline: {' and '.join(type(each).__name__ for each in models.values())} has no pipeline plan in "
            "transformers: give the task units(model), the blocks in order that are the whole model, or use shard="
        )
    transformers.switch_off_cache(language_model)
    behind = order[order.index(lists[0]) + 1 :]
    layers = list(language_model.get_submodule(lists[0]))
    parts = _Parts(model, language_model, lists[0], behind)
    return [Before(parts, layers), *(Layer(layer, number) for number, layer in enumerate(layers)), Behind(parts)]


class _Parts:
    """A model of transformers, the names of its layers and of the modules that run after them.

    Args:
        outer: the task's model: `model` itself or a module around it.
    """

    def __init__(self, outer: nn.Module, model: Any, layers: str, behind: list[str]) -> None:
        self.outer, self.model, self.layers, self.behind = outer, model, layers, behind
        place = layers.rpartition(".")[0]
        beside = [f"{place}.{name}".lstrip(".") for name, _ in model.get_submodule(place).named_children()]
        self.before = [name for name in beside if name not in (layers, *behind)]

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
        parts, nothing = self._parts, {name: nn.Identity() for name in self._parts.behind}
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
        self.held = nn.ModuleList(parts.model.get_submodule(name) for name in parts.behind)

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
