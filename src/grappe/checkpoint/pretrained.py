"""pretrained: gives a model the weights of a local folder as transformers and others write it, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from torch import nn

from grappe.checkpoint.foreign_training import Shapes, copy_values, differences, match
from grappe.checkpoint.tensor_file import TensorFiles
from grappe.errors import TaskError
from grappe.errors.foreign_text import printable
from grappe.launch import files

Model = TypeVar("Model", bound=nn.Module)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def pretrained(model: Model, place: Path | str, *, fresh: Sequence[str] = (), unused: Sequence[str] = ()) -> Model:
    """Copies weights from safetensors files into `model`, and returns it; for `Task.model`.

    One process of a training does it, once, with memory for the model and one tensor more. All others make the model
    without memory (on the meta device), where this function reads nothing, and get their parts from the run's first
    checkpoint.

    Args:
        place: a folder with model.safetensors or model.safetensors.index.json, or one .safetensors file.
        fresh: patterns of the names ("classifier.*") that the files lack; these keep their initial values.
        unused: patterns of the names in the files that the model does not have.

    Raises:
        TaskError: there are no such files, or names differ.
        UsageError: shapes or kinds of numbers differ.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return model
    where = f"grappe.pretrained({str(place)!r})"
    weights = _files(Path(place), where)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."  # a model of transformers, with or without its head
    matched = match(model, weights, [lambda name: f"{prefix}{name}", lambda name: name.removeprefix(prefix)])
    missing, left = _without(matched.missing, fresh), _without(matched.left, unused)
    if missing or left:
        raise TaskError(
            f"{where}: the names differ from the model's. {differences(missing, left)}. If you mean this, give "
            "fresh=[…] for parameters to train from scratch and unused=[…] for those to ignore: patterns such as "
            f"{next(iter(missing or left)).partition('.')[0]}.*"
        )
    copy_values(matched, weights, where)
    return model


def _files(place: Path, where: str) -> TensorFiles:
    # What the user names may be a link, as in transformers' own cache.
    named = [place] if place.is_file() and place.suffix == ".safetensors" else []
    if (place / INDEX).is_file():
        named = [place / name for name in _indexed(place / INDEX, where)]
    elif (place / SINGLE).is_file():
        named = [place / SINGLE]
    if named:
        return TensorFiles([file.resolve() for file in named], levels=1)
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
        raise TaskError(f"{where}: {INDEX} is not an index of safetensors files: {error}") from error
    for name in names:
        if Path(name).name != name or not (file.parent / name).is_file():
            raise TaskError(f"{where}: {INDEX} names {printable(name, 80)}, which is not in the folder")
    return names


def _without(names: Shapes, patterns: Sequence[str]) -> Shapes:
    return {name: shape for name, shape in names.items() if not any(fnmatchcase(name, pattern) for pattern in patterns)}
