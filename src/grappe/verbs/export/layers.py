"""Finds the layer at which an exported model first differs: between two batches, in its trace, or once compiled."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grappe.private_api.torch import tree_leaves
from grappe.verbs.export.program import Program, trace
from grappe.verbs.export.proof import TOLERANCE, Differs, row_differences
from grappe.verbs.export.samples import Samples

Call = Callable[..., Sequence[Tensor]]
Writer = Callable[["Watched"], Call]
"""Makes what an export makes of a program (a compiled package, say) from one that gives its layers too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One tensor that a call of a layer gave."""

    name: str
    value: Tensor


class Watched(nn.Module):
    """A program that also gives what each layer of its model gives, in the order in which the layers end.

    The layers' tensors are outputs like its own, so a trace of it, and what is compiled of that, gives them too.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        with _kept(self.program.model) as kept:
            outputs = self.program(*leaves)
        return (*(one.value for one in kept), *outputs)

    def names(self, leaves: Sequence[Tensor]) -> list[str]:
        """Names the layers' tensors, by running the model."""
        with torch.no_grad(), _kept(self.program.model) as kept:
            self.program(*leaves)
        return [one.name for one in kept]


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[list[Layer]]:
    """Keeps each layer's tensors as they are when the layer ends: a later one may compute in place."""
    found: list[Layer] = []

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    found.append(Layer(name=name, value=leaf.clone()))

        return keep

    hooks = [
        module.register_forward_hook(
            hook(f"{path} ({type(module).__name__})" if path else type(module).__name__)
        )
        for path, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()


def located(error: Differs, program: Program, samples: Samples, *, predicted: int, write: Writer) -> str:
    """Says at which layer, and at which step of the export, the sample of `error` begins to differ.

    Each step is run once more with the layers' tensors among its outputs, on the batch in which the sample differed.

    Args:
        predicted: samples in a batch of `grappe predict`.
        write: the last step.
    """
    assert error.sample is not None and error.batch is not None
    watched, (first, last) = Watched(program), error.batch
    inputs, row = samples.read(first, last), error.sample - first
    start = error.sample // predicted * predicted
    whole = samples.read(start, min(start + predicted, samples.length))
    names = watched.names(inputs)
    with torch.no_grad():
        ours = watched(*inputs)
        sizes = (last - first, len(whole[0]))
        again = _rows(watched(*whole), sizes[1], error.sample - start)
        found = _first(names, _rows(ours, sizes[0], row), again)
    if found:
        return f"{found} in a batch of {sizes[0]} and in one of {sizes[1]}: it depends on the other samples"
    traced = trace(watched, samples.example())
    for what, call in (("as torch.export traces it", traced.module()), ("as it was written", None)):
        with torch.no_grad():
            theirs = (call or write(watched))(*inputs)
        size = last - first
        if found := _first(names, _rows(ours, size, row), _rows(theirs, size, row)):
            return f"{found} in the model and {what}"
    return "no layer differs in Python once its output is kept: what was written is wrong only as a whole"


def _first(names: list[str], ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> str:
    """Names the first layer whose tensors differ; "" where none does."""
    for name, a, b in zip(names, ours, theirs, strict=False):
        if a.shape != b.shape:
            continue  # of the whole batch
        gap = float(row_differences(a, b).max()) if a.numel() else 0.0
        if not gap <= (TOLERANCE if a.is_floating_point() else 0):
            return f"the layer {name} is the first that differs, by {gap:.1e} of its row,"
    return ""


def _rows(layers: Sequence[Tensor], size: int, row: int) -> list[Tensor]:
    """Returns a sample's row of each tensor that has one for each of the `size` samples, and the others whole."""
    return [one[row : row + 1] if one.dim() and len(one) == size else one[None] for one in layers]
