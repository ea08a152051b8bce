"""pretrained: gives a model the weights of a local folder as transformers and others write it, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from grappe.checkpoint.tensor_file import TensorFiles
from grappe.checkpoint.weights import kind_of
from grappe.errors import TaskError
from grappe.errors.foreign_text import printable
from grappe.launch import files

Model = TypeVar("Model", bound=nn.Module)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHOWN = 5


@torch.no_grad()
def pretrained(
    model: Model, place: Path | str, *, fresh: Sequence[str] = (), unused: Sequence[str] = ()
) -> Model:
    """Copies weights from safetensors files into `model`, and returns it; for `Task.model`.

    One process of a training does it, once, with memory for the model and one tensor more. All others make the model
    without memory (on the meta device), where this function reads nothing, and get their parts from the run's first
    checkpoint.

    Args:
        place: a folder with model.safetensors or model.safetensors.index.json, or one .safetensors file.
        fresh: patterns of the names ("classifier.*") that the files lack; these keep their initial values.
        unused: patterns of the names in the files that the model does not have.

    Raises:
        TaskError: there are no such files, or names, shapes or kinds of numbers differ.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return model
    where = f"grappe.pretrained({str(place)!r})"
    weights = _files(Path(place), where)
    own: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():  # tied parameters under each of their names
        own.setdefault(id(tensor), (tensor, []))[1].append(name)
    theirs = _names(weights, model)
    missing = [names[0] for _, names in own.values() if not any(name in theirs for name in names)]
    own_names = {name for _, names in own.values() for name in names}
    left = [name for name_here, name in theirs.items() if name_here not in own_names]
    missing, left = _without(missing, fresh), _without(left, unused)
    if missing or left:
        raise TaskError(
            f"{where}: the names differ from the model's. Missing: {_some(missing)}. Left over: {_some(left)}. Where "
            f"that is meant, say fresh=[…] for what is to be learned, and unused=[…] for what is left: patterns as "
            f"{(missing or left)[0].partition('.')[0]}.*"
        )
    for tensor, names in own.values():
        source = next((theirs[name] for name in names if name in theirs), None)
        if source is None:
            continue
        if weights.shape(source) != tuple(tensor.shape):
            raise TaskError(
                f"{where}: {names[0]} is {list(weights.shape(source))} there and {list(tensor.shape)} in the model: "
                "is it made from the same configuration?"
            )
        value = weights.read(source)
        if kind_of(value.dtype) != kind_of(tensor.dtype):
            kinds = f"{value.dtype} there and {tensor.dtype} in the model".replace("torch.", "")
            raise TaskError(f"{where}: {names[0]} is {kinds}: quantized weights have to be converted first")
        tensor.copy_(value)
    return model


def _files(place: Path, where: str) -> TensorFiles:
    # What the user names may be a link, as in transformers' own cache.
    if place.is_file() and place.suffix == ".safetensors":
        return TensorFiles([place.resolve()], levels=1)
    if (place / INDEX).is_file():
        return TensorFiles([(place / name).resolve() for name in _indexed(place / INDEX, where)], levels=1)
    if (place / SINGLE).is_file():
        return TensorFiles([(place / SINGLE).resolve()], levels=1)
    pickled = sorted(file.name for file in place.glob("*.bin"))
    why = f"only {pickled[0]}, a pickle, which is never loaded" if pickled else "there is neither"
    raise TaskError(
        f"{where}: it has to be a .safetensors file, or a folder with {SINGLE} or {INDEX}, and {why}: "
        "model.save_pretrained(FOLDER) writes it"
    )


def _indexed(file: Path, where: str) -> list[str]:
    """Returns the names of the files of an index."""
    try:
        listed = json.loads(files.read_text(file.resolve(), levels=1))["weight_map"].values()
        names = sorted({str(name) for name in listed})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TaskError(f"{where}: {INDEX} is no index of safetensors files: {error}") from error
    for name in names:
        if Path(name).name != name or not (file.parent / name).is_file():
            raise TaskError(f"{where}: {INDEX} names {printable(name, 80)}, which is not in the folder")
    return names


def _names(weights: TensorFiles, model: nn.Module) -> dict[str, str]:
    """Returns the files' names by the model's: a model of transformers may be without its head, or with one."""
    prefix, own = f"{getattr(model, 'base_model_prefix', '')}.", set(model.state_dict())
    ways = [
        {name: name for name in weights},
        {f"{prefix}{name}": name for name in weights},
        {name.removeprefix(prefix): name for name in weights},
    ]
    return max(ways, key=lambda way: len(own & set(way)))


def _without(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(printable(name, 80) for name in names[:SHOWN]) + more) or "none"
