"""Matches the tensors of a file with a model's: by their names, without the prefixes of wrappers, or by shapes."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from grappe.checkpoint.weights import Weights, kind_of
from grappe.errors import UsageError
from grappe.errors.foreign_text import printable

PREFIXES = ("module.", "model.", "_orig_mod.", "net.", "_forward_module.")
SHOWN = 5
CANDIDATES = 200  # names of a file that are compared with one of the model's: more would take long
Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor of the model, and where its values are in the file."""

    name: str
    """First name in the model: tied tensors have several."""
    tensor: Tensor
    sources: Sequence[str]
    """Names in the file; several where the file has each name of a tied tensor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matched:
    """A model's tensors and a file's, matched."""

    places: Sequence[Place]
    missing: Shapes
    """The model's parameters and saved buffers that the file lacks."""
    left: Shapes
    """The file's tensors that the model lacks, by their names there."""
    note: str = ""
    """Note for the user on a match that is not by names."""


def match(model: nn.Module, weights: Weights, ways: Iterable[Callable[[str], str]] | None = None) -> Matched:
    """Matches by names as they are; where another of `ways` fits more names, by that one.

    Args:
        ways: functions from a name in the file to one in the model. None: what DDP, Lightning, torch.compile or a
            module around the model put before all names is left out on both sides. Where no name fits even so, but
            each shape is there once on both sides, tensors are matched by shapes.
    """
    own: dict[int, tuple[Tensor, list[str]]] = {}
    tensors = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    for name, tensor in tensors:
        own.setdefault(id(tensor), (tensor, []))[1].append(name)
    saved, names = set(model.state_dict()), {name for name, _ in tensors}
    prefixes = wrapping(saved), wrapping(weights)
    if by_shape := ways is None:
        ways = [lambda name: prefixes[0] + name.removeprefix(prefixes[1])]
    theirs = {name: name for name in weights}
    for way in ways:
        theirs = max(theirs, {way(name): name for name in weights}, key=lambda each: len(names & each.keys()))
    note = ""
    if by_shape and not names & theirs.keys():
        shapes = {tuple(tensor.shape): name for name, tensor in tensors if name in saved}
        of_shape = {weights.shape(name): name for name in weights}
        if shapes.keys() == of_shape.keys() and len(shapes) == len(saved) and len(shapes) == len(list(weights)):
            theirs = {name: of_shape[shape] for shape, name in shapes.items()}
            pairs = [f"{source} as {name}" for name, source in theirs.items()]
            note = f"no name is the model's, and each shape is there once: took {some(pairs)}"
    places = [
        Place(name=every[0], tensor=tensor, sources=[theirs[name] for name in every if name in theirs])
        for tensor, every in own.values()
    ]
    return Matched(
        places=places,
        missing={
            place.name: tuple(place.tensor.shape) for place in places if not place.sources and place.name in saved
        },
        left={source: weights.shape(source) for name, source in theirs.items() if name not in names},
        note=note,
    )


def wrapping(names: Iterable[str]) -> str:
    """Returns the prefix that DDP, Lightning or torch.compile put before all names; two wrappers make one prefix."""
    wrapped, names = "", list(names)
    while prefix := next((p for p in PREFIXES if names and all(n.startswith(wrapped + p) for n in names)), ""):
        wrapped += prefix
    return wrapped


@torch.no_grad()
def copy_values(matched: Matched, weights: Weights, where: str) -> None:
    """Copies the file's values into the model.

    Args:
        where: the words for the file, which begin the message.

    Raises:
        UsageError: values have another shape or kind, or a tied tensor has two values.
    """
    for place in [place for place in matched.places if place.sources]:
        name, tensor, (first, *others) = place.name, place.tensor, place.sources
        if weights.shape(first) != tuple(tensor.shape):
            shapes = f"{list(weights.shape(first))} there and {list(tensor.shape)} in the model"
            raise UsageError(f"{where}: {name} is {shapes}: is it made from the same configuration?")
        value = weights.read(first)
        if kind_of(value.dtype) != kind_of(tensor.dtype):
            kinds = f"{value.dtype} there and {tensor.dtype} in the model".replace("torch.", "")
            raise UsageError(f"{where}: {name} is {kinds}: quantized weights have to be converted first")
        for other in others:
            if not torch.equal(weights.read(other), value):
                raise UsageError(
                    f"{where}: {first} and {other} differ there, and are one tensor in the model, {name}: give each "
                    "its own parameter in model(), or delete one of them from the file"
                )
        tensor.copy_(value)


def differences(missing: Shapes, left: Shapes) -> str:
    """Describes what does not match: names of each side, and for the model's the nearest ones of the file."""
    pairs = [f"{name} -> {near}" for name in list(missing)[:SHOWN] if (near := _nearest(name, missing[name], left))]
    near = f". Nearest: {some(pairs)}" if pairs else ""
    return f"Missing: {some(missing)}. Left over: {some(left)}{near}"


def _nearest(name: str, shape: tuple[int, ...], left: Shapes) -> str:
    """Returns the most similar name of the same shape; without that shape, a similar name; "" without one."""
    same = [other for other in left if left[other] == shape]
    cutoff, candidates = (0.0, same) if same else (0.6, list(left))
    shown = [printable(other, 80) for other in candidates[:CANDIDATES]]
    return next(iter(difflib.get_close_matches(name[:80], shown, 1, cutoff)), "")


def some(names: Iterable[str]) -> str:
    """Lists the first names, and the number of others."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(printable(name, 160) for name in names[:SHOWN]) + more) or "none"
