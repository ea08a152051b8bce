"""Finds a script's tensors and samples, and what they are in the task that was ported from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grappe.data.arrays import in_memory
from grappe.data.collate import collated
from grappe.errors import UsageError
from grappe.private_api.torch import tree_leaves
from grappe.task import Task
from grappe.training.interception import alive

CLOSE = 1e-5
"""The largest relative difference of a sample that is the same, normalised with other rounding."""
SEARCH_SECONDS = 30.0


class ScriptTensors(NamedTuple):
    """The tensors of the modules that an optimizer trains, by name."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    modules: list[nn.Module]
    root: nn.Module | None
    """The module that has all parameters, if one has."""


def tensors_of(*optimizers: Optimizer) -> ScriptTensors:
    """Finds the modules whose parameters optimizers have, and their tensors by name."""
    every = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    trained = set(map(id, every))
    holding = [each for each in alive(nn.Module) if any(id(parameter) in trained for parameter in each.parameters())]
    inner = {id(child) for module in holding for child in module.modules() if child is not module}
    roots = [module for module in holding if id(module) not in inner]
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for number, root in enumerate(roots):
        prefix = f"{number}." if len(roots) > 1 else ""
        parameters |= {f"{prefix}{name}": each for name, each in root.named_parameters()}
        buffers |= {f"{prefix}{name}": each for name, each in root.named_buffers()}
    loose = trained - {id(each) for each in parameters.values()}
    parameters |= {f"parameter {number}": each for number, each in enumerate(every) if id(each) in loose}
    return ScriptTensors(parameters, buffers, roots, roots[0] if len(roots) == 1 and not loose else None)


def dropout_rates(models: Iterable[nn.Module]) -> list[float]:
    """Lists the rates of the dropout layers of models."""
    layers = [each for model in models for each in model.modules() if "Dropout" in type(each).__name__]
    return [float(each.p) for each in layers if hasattr(each, "p")]  # type: ignore[arg-type]


Pairs = dict[str, tuple[Tensor, Tensor]]
"""The script's tensor and the task's, by the task's name."""


def paired(
    own: Mapping[str, Tensor], script: Mapping[str, Tensor], first: Mapping[int, Tensor]
) -> tuple[Pairs, dict[str, Tensor]]:
    """Pairs the task's tensors with the script's: by name, by equal bits, by shape in order.

    Args:
        first: the script's tensors as they were at first, by id, where they have changed.

    Returns:
        The pairs, and the script's tensors that have no other.
    """
    pairs: Pairs = {}
    left = dict(script)
    rules: tuple[Callable[[str, Tensor, str, Tensor], bool], ...] = (
        lambda name, _, other, __: name == other,
        lambda _, tensor, __, theirs: torch.equal(tensor, first.get(id(theirs), theirs).to(tensor)),
        lambda *_: True,
    )
    for rule in rules:
        for name, tensor in own.items():
            alike = (each for each, theirs in left.items() if tensor.shape == theirs.shape)
            other = next((each for each in alike if rule(name, tensor, each, left[each])), None)
            if name not in pairs and other is not None:
                pairs[name] = left.pop(other), tensor
    return {name: pairs[name] for name in own if name in pairs}, left


def listed(who: str, tensors: Mapping[str, Tensor]) -> str:
    """Names the first tensors with their shapes, for a message."""
    shown = [f"{name} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:5]]
    more = f" and {len(tensors) - 5} more" if len(tensors) > 5 else ""
    return f"{who} {', '.join(shown)}{more} alone" if shown else f"{who} no others"


class SampleStatistics(NamedTuple):
    """SampleStatistics of a batch's values, and the shape of a sample."""

    shape: tuple[int, ...]
    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"mean {self.mean:.3g} and deviation {self.deviation:.3g}"


def inputs_of(batch: Any) -> Tensor:
    """Returns the first tensor of a batch."""
    return next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)).cpu()


def as_pair(batch: Any, task: Task, dataset: Any) -> tuple[Any, Any]:
    """Returns a script's batch as (inputs, targets): a dict has the names of the task's inputs, and one for targets.

    Raises:
        UsageError: it has others, or is no pair.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    inputs, _ = collated(task, [dataset[0]])
    if isinstance(batch, Mapping) and isinstance(inputs, Mapping) and inputs.keys() < batch.keys():
        target, *others = batch.keys() - inputs.keys()
        if not others:
            return {name: batch[name] for name in inputs}, batch[target]
    kind = f"dict of {', '.join(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
    raise UsageError(
        f"the script's batch is a {kind}, and no pair (inputs, targets): let the task's collate() return inputs in a "
        "dict of the script's names, of which one is left for the targets"
    )


def statistics_of(inputs: Tensor) -> SampleStatistics:
    """Computes the statistics of a batch [B, ...]."""
    values = inputs.detach().double()
    return SampleStatistics(tuple(inputs.shape[1:]), float(values.mean()), float(values.std()))


def unseen_samples(task: Task, dataset: Any, inputs: Tensor) -> tuple[int, SampleStatistics]:
    """Counts samples [B, ...] that are none of the task's; returns the statistics of some of the task's, too.

    Each sample is projected on a few directions: the same sample, normalised with other rounding, stays where it is.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(inputs[0].numel(), 4, generator=generator, dtype=torch.float64)
    flat = inputs.flatten(1).double()
    marks, size = flat @ directions, flat.norm(dim=1, keepdim=True) + 1e-12
    seen = torch.zeros(len(inputs), dtype=torch.bool)
    statistics: SampleStatistics | None = None
    arrays, deadline = in_memory(dataset), time.monotonic() + SEARCH_SECONDS
    for first in range(0, len(dataset), 256):
        places = np.arange(first, min(first + 256, len(dataset)))
        if arrays is not None:
            batch = arrays.gather(places, torch.device("cpu"))
        else:
            batch = collated(task, [dataset[int(place)] for place in places])
        own = inputs_of(batch)
        statistics = statistics or statistics_of(own)
        if statistics.shape != tuple(inputs.shape[1:]):
            break
        apart = ((own.flatten(1).double() @ directions)[None] - marks[:, None]).abs().amax(-1)
        seen |= (apart < CLOSE * size).any(1)
        if bool(seen.all()) or time.monotonic() > deadline:
            break
    assert statistics is not None, "a task has samples"
    return int((~seen).sum()), statistics
