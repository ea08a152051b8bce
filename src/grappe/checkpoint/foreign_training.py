"""Reads weights and optimizer state that grappe did not write, and matches their names with the model's."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grappe.checkpoint.format import refuse_package
from grappe.checkpoint.tensor_file import Piece, TensorFiles
from grappe.checkpoint.weights import OPTIMIZER, InMemory, Weights, kind_of
from grappe.errors import RunError, TaskError, UsageError, refuse_pointer
from grappe.errors.foreign_text import printable
from grappe.launch import files

PREFIXES = ("module.", "model.", "_orig_mod.", "net.", "_forward_module.")
INSIDE = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # what wraps parts of a model
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
        inside = wrapping(INSIDE.sub("", name) for name in weights)
        ways = [
            lambda name: prefixes[0] + name.removeprefix(prefixes[1]),
            lambda name: prefixes[0] + INSIDE.sub("", name).removeprefix(inside),
        ]
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
            raise UsageError(f"{where}: {name} is {shapes}: is it made from the same configuration? {NEW_LAYERS}")
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
    pairs = []
    for name in list(missing)[:SHOWN]:
        same = [other for other in left if left[other] == missing[name]]  # of the same shape; without one, of any
        cutoff, candidates = (0.0, same) if same else (0.6, list(left))
        shown = [printable(other, 80) for other in candidates[:CANDIDATES]]
        pairs += [f"{name} -> {near}" for near in difflib.get_close_matches(name[:80], shown, 1, cutoff)]
    near = f". Nearest: {some(pairs)}" if pairs else ""
    return f"Missing: {some(missing)}. Left over: {some(left)}{near}"


def some(names: Iterable[str]) -> str:
    """Lists the first names, and the number of others."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(printable(name, 160) for name in names[:SHOWN]) + more) or "none"


PICKLED = (".ckpt", ".pt", ".pth", ".bin")
NEW_LAYERS = (
    "To train some layers from scratch, let model() return "
    'grappe.pretrained(model, FILE, fresh=["NAME.*"]), and leave --from out'
)
ALONE = "save the weights alone: torch.save(model.state_dict(), FILE)"
KEYS = ("state_dict", "model_state_dict", "model", "net", "network", "weights")
"""Keys under which scripts save a model's weights next to the optimizer and the epoch."""
MAGIC = (b"PK", b"\x80")
"""First bytes of a file of torch.save: a zip archive, or an old pickle."""


def foreign_weights(file: Path) -> Weights:
    """Reads the weights in a .safetensors file, a Lightning .ckpt, or a .pt state dict.

    A pickle is only read through torch's `weights_only` unpickler, which makes tensors and plain containers, and
    runs nothing.

    Raises:
        RunError: the file is missing, damaged, or holds more than weights.
    """
    refuse_package(file)
    if not file.is_file():
        raise RunError(f"--from {file}: there is no such run or file")
    with file.open("rb") as stream:
        head = stream.read(64)
    refuse_pointer(f"--from {file}", head)
    if file.suffix == ".safetensors":
        weights = TensorFiles([file.resolve()], levels=1)  # the user named it: it may be a link
        if weights.has_pieces:
            raise RunError(f"--from {file}: this is only one part of a grappe checkpoint: give the run's folder")
        return weights
    if not head.startswith(MAGIC):
        raise RunError(
            f"--from {file}: give a run's folder, a .safetensors file, or what torch.save wrote (.ckpt, .pt): this one "
            f"begins with {head[:8]!r}"
        )
    return InMemory(state_dict_of(read_content(file), file))


# The functions that pickle names in a number's place, and in an array's; older files have the second module's name.
_MAKERS: list[Any] = [value.__reduce__()[0] for value in (np.float64(0), np.zeros(0))]
_PLACES = ("numpy._core.multiarray", "numpy.core.multiarray")
HARMLESS: list[Any] = [argparse.Namespace, np.dtype, np.ndarray, *{type(np.dtype(code)) for code in "?bhilqBHILQefdg"}]
HARMLESS += [(each, f"{place}.{each.__name__}") for each in _MAKERS for place in _PLACES]
"""Types and functions that torch may call beyond tensors and containers: NumPy's numbers and arrays, a Namespace."""


def read_content(file: Path) -> Any:
    """Reads what torch.save wrote, as tensors and plain containers only.

    Raises:
        RunError: the file is damaged, or holds more than those.
    """
    try:
        zipped = zipfile.is_zipfile(file)
        if zipped:
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise RunError("it is compressed, which torch's own files never are")
        # Mapped, tensors that are not read (the optimizer's state) cost no memory.
        with torch.serialization.safe_globals(HARMLESS):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except MemoryError as error:
        raise RunError(f"--from {file}: it needs more memory than the model's weights may: {ALONE}") from error
    except Exception as error:  # torch raises many kinds for a damaged or hostile file
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0].partition(" Please")[0]
        reason = reason or type(error).__name__
        raise RunError(
            f"--from {file}: it contains more than weights, or is damaged: {reason[:200]}. Nothing in it was run: "
            f"{ALONE}"
        ) from error


def state_dict_of(content: Any, file: Path) -> dict[str, Tensor]:
    """Returns the model's weights in the content of a file.

    Raises:
        RunError: there are none.
    """
    if isinstance(content, dict):
        content = next((content[key] for key in KEYS if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        entries = content if isinstance(content, dict) else {}
        if inner := [str(name) for name, value in entries.items() if isinstance(value, dict) and value]:
            raise RunError(
                f"--from {file}: it has several parts ({some(inner)}): save the weights of one: "
                f"torch.save(torch.load(FILE, weights_only=True)[{printable(inner[0], 80)!r}], 'weights.pt')"
            )
        other = next(
            (f", whose {key!r} is no tensor" for key, value in entries.items() if type(value) is not Tensor), ""
        )
        raise RunError(f"--from {file}: there is no state dict in it, only {type(content).__name__}{other}: {ALONE}")
    for name, value in content.items():
        if (why := not_plain(value)) is not None:
            raise RunError(f"--from {file}: {name!r} is {why}: weights are plain tensors: {ALONE}")
    return content


def not_plain(tensor: Tensor) -> str | None:
    """Names the kind of a tensor that is not a plain one in memory; None for a plain one."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"of the class {type(tensor).__name__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return f"of the layout {str(tensor.layout).removeprefix('torch.')}"
    return f"on the device {tensor.device.type}" if tensor.device.type != "cpu" else None


Model = TypeVar("Model", bound=nn.Module)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def pretrained(model: Model, place: Path | str, *, fresh: Sequence[str] = (), unused: Sequence[str] = ()) -> Model:
    """Copies weights from safetensors files into `model`, and returns it; for `Task.model`.

    One process of a training does it, once, with memory for the model and one tensor more. All others make the model
    without memory (on the meta device), where this function reads nothing, and get their parts from the run's first
    checkpoint.

    Args:
        place: a folder with model.safetensors or model.safetensors.index.json, a .safetensors file, or a .pt, .pth or
            .ckpt of weights alone.
        fresh: patterns of the names ("classifier.*") that the files lack, or have with another shape; these keep their
            initial values.
        unused: patterns of the names in the files that the model does not have.

    Raises:
        TaskError: there are no such files, or names differ.
        UsageError: shapes or kinds of numbers differ.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return model
    where = f"grappe.pretrained({str(place)!r})"
    weights = files_of(Path(place), where)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."  # a model of transformers, with or without its head
    matched = match(model, weights, [lambda name: f"{prefix}{name}", lambda name: name.removeprefix(prefix)])
    missing, left = _without(matched.missing, fresh), _without(matched.left, unused)
    if missing or left:
        raise TaskError(
            f"{where}: the names differ from the model's. {differences(missing, left)}. If you mean this, give "
            "fresh=[…] for parameters to train from scratch and unused=[…] for those to ignore: patterns such as "
            f"{next(iter(missing or left)).partition('.')[0]}.*"
        )
    kept = [place for place in matched.places if not _is_fresh(place, weights, fresh)]
    copy_values(dataclasses.replace(matched, places=kept), weights, where)
    return model


def _is_fresh(place: Place, weights: Weights, patterns: Sequence[str]) -> bool:
    """Returns whether a tensor keeps its initial values, as the file has its name with another shape."""
    others = [weights.shape(source) for source in place.sources if weights.shape(source) != tuple(place.tensor.shape)]
    return bool(others) and any(fnmatchcase(place.name, pattern) for pattern in patterns)


def files_of(place: Path, where: str) -> Weights:
    """Opens the weights of a .safetensors file, of what torch.save wrote, or of a folder of transformers'.

    Raises:
        TaskError: it is none of these.
    """
    if place.is_file() and place.suffix in PICKLED:
        return foreign_weights(place)
    # A file that the user names may be a link, as in transformers' own cache.
    named = [place] if place.is_file() and place.suffix == ".safetensors" else []
    if (place / INDEX).is_file():
        try:
            listed = json.loads(files.read_text((place / INDEX).resolve(), levels=1))["weight_map"].values()
            names = sorted({str(name) for name in listed})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TaskError(f"{where}: {INDEX} is not an index of safetensors files: {error}") from error
        for name in names:
            if Path(name).name != name or not (place / name).is_file():
                raise TaskError(f"{where}: {INDEX} names {printable(name, 80)}, which is not in the folder")
        named = [place / name for name in names]
    elif (place / SINGLE).is_file():
        named = [place / SINGLE]
    if named:
        return TensorFiles([file.resolve() for file in named], levels=1)
    pickled = sorted(file.name for file in place.glob("*") if file.suffix in PICKLED)
    why = f"only {pickled[0]}: name that file, to read its weights alone" if pickled else "there is neither"
    raise TaskError(
        f"{where}: it has to be a .safetensors file, or a folder with {SINGLE} or {INDEX}, and {why}: "
        "model.save_pretrained(FOLDER) writes it"
    )


def _without(names: Shapes, patterns: Sequence[str]) -> Shapes:
    return {name: shape for name, shape in names.items() if not any(fnmatchcase(name, pattern) for pattern in patterns)}


OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "opt", "optimizer_states")
"""Under which scripts, and Lightning, save the state of an optimizer."""
EPOCHS = ("epoch", "epochs", "start_epoch")
OF_A_VERSION = {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
"""Fields of a parameter group that some versions of torch have and others have not."""
OF_A_SCHEDULE = {
    "params", "param_names", "initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "lr_scale",
    "name",
}  # fmt: skip
"""Fields of a parameter group that schedules and scripts add."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begin:
    """Beginning of a new run: its position in the data, and the state of another training that is taken over."""

    source: Path
    """A run, or a file."""
    with_optimizer: bool = False
    """Whether the optimizer's state is taken over, and the number of epochs done."""
    epochs_done: int | None = None
    """Epochs that are done; None: what the file says, with its optimizer's state; else 0."""
    epochs: int = 0
    """Epochs of the task."""
    steps_per_epoch: int = 0
    engine: str = "native"
    """The engine that will go on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeignTraining:
    """The state of another training, in the form of a checkpoint."""

    epochs_done: int
    pieces: Sequence[Piece]
    """`optimizer.NAME.KEY`: the optimizer's tensors."""
    state: Mapping[str, Any]
    """The checkpoint's JSON, as a training under the engine would have written it."""
    notes: Sequence[str]
    """Notes for the user, one line each."""


def foreign_training(begin: Begin, model: nn.Module, optimizer: Optimizer | None) -> ForeignTraining:
    """Reads the state of the training that saved the file `begin.source`.

    torch numbers an optimizer's parameters in the order of its construction: the task's optimizer is assumed to have
    the same parameters in the same order as the script's.

    Args:
        model: the task's, for its parameters' names.
        optimizer: the task's, over its trainable parameters; None: its state is not read.

    Raises:
        RunError: the file holds no such state, or the state is not one of this optimizer.
    """
    file = begin.source
    if callable(getattr(optimizer, "eval", None)):  # schedule-free: it evaluates other weights than it trains
        raise RunError(
            f"--with-optimizer --from {file}: {type(optimizer).__name__} has two sets of weights, and counts outside "
            "its state: only its own run can continue it. Leave --with-optimizer out"
        )
    if optimizer is None:
        return _going_on(begin, begin.epochs_done or 0, (), {}, ())
    if file.is_dir():
        raise RunError(
            f"--with-optimizer --from {file}: that is a folder: continue a run of grappe by --run {file}; "
            "--with-optimizer is for files of other scripts (.pt, .ckpt)"
        )
    if file.suffix == ".safetensors":
        raise RunError(f"--with-optimizer --from {file}: a .safetensors file holds weights alone")
    content = read_content(file)
    if not isinstance(content, dict):
        raise RunError(f"--from {file}: there is no state dict in it, only {type(content).__name__}")
    saved = _optimizer_of(content, file)
    notes = _check_groups(saved, optimizer, file)
    _check_order(content, model, file)
    _check_states(saved, optimizer, file)
    optimizer.load_state_dict(dict(saved))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pieces, values = [], {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                pieces.append(Piece.complete(f"{OPTIMIZER}{names[id(parameter)]}.{key}", value.cpu()))
            elif value is not None:
                values.setdefault(names[id(parameter)], {})[key] = value
    done, how = _epochs_done(content, begin)
    return _going_on(begin, done, pieces, values, [*how, *notes])


def _optimizer_of(content: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    state: list[Any] = [{}]
    for saved in map(content.get, OPTIMIZER_KEYS):
        candidates = saved if isinstance(saved, list) else [saved]  # a list is Lightning's
        # A script may save other things as `opt`.
        if candidates and all(isinstance(entry, dict) and "param_groups" in entry for entry in candidates):
            state = candidates
            break
    if len(state) != 1:
        raise RunError(f"--with-optimizer --from {file}: it has the states of {len(state)} optimizers, not of one")
    held = state[0]
    groups = held.get("param_groups")
    has_groups = isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
    if not (has_groups and isinstance(held.get("state"), dict)):
        keys = ", ".join(printable(str(key), 40) for key in list(content)[:8]) or "nothing"
        raise RunError(
            f"--with-optimizer --from {file}: there is no optimizer's state in it, as torch.save({{'optimizer': "
            f"optimizer.state_dict(), …}}) writes it, only: {keys}. Leave --with-optimizer out, and give "
            "--epochs-done N to begin after N epochs with a fresh optimizer"
        )
    return held


def _check_groups(saved: Mapping[str, Any], optimizer: Optimizer, file: Path) -> list[str]:
    """Refuses groups that are not the optimizer's; returns a note for each number in which they differ."""
    theirs, ours = saved["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in groups] for groups in (theirs, ours)]
    if sizes[0] != sizes[1]:
        raise RunError(
            f"--with-optimizer --from {file}: its optimizer has {_sizes(sizes[0])}, this task's {_sizes(sizes[1])}: "
            "the task's optimizer() must be given the parameters as the script's was"
        )
    notes = []
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        ignored = OF_A_VERSION | OF_A_SCHEDULE
        differing = (set(their) ^ set(our)) - ignored
        if differing:
            raise RunError(
                f"--with-optimizer --from {file}: its optimizer is not of the class {type(optimizer).__name__}: only "
                f"one of the two has {', '.join(sorted(printable(str(name), 40) for name in differing)[:5])}"
            )
        where = f" of group {number}" if len(ours) > 1 else ""
        notes += [
            f"{name}{where}: {printable(str(their[name]), 40)} in the file, {our[name]} in the task, which counts"
            for name in our
            if name not in {*ignored, "lr"} and _plain(their[name]) != _plain(our[name])
        ]
        if _plain(their["lr"]) != _plain(our["lr"]):
            notes.append(
                f"lr{where}: last {printable(str(their['lr']), 40)} in the file; the task's lr and schedule count"
            )
    return notes


def _sizes(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes)) + f" parameters in {len(sizes)} group" + ("s" if len(sizes) > 1 else "")


def _plain(value: object) -> object:
    """Returns a number, or a tuple of numbers, whatever holds it."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    return tuple(value) if isinstance(value, list) else value


def _check_order(content: Mapping[str, Any], model: nn.Module, file: Path) -> None:
    """Refuses weights whose parameters come in another order than the model's: the optimizer knows them by number."""
    weights = state_dict_of(content, file)
    places = {source: place.name for place in match(model, InMemory(weights)).places for source in place.sources}
    ours = [name for name, _ in model.named_parameters()]
    our_names = set(ours)
    theirs = [name for name in dict.fromkeys(map(places.get, weights)) if name in our_names]
    if theirs != ours:
        differing = next((pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]), ("", ""))
        raise RunError(
            f"--with-optimizer --from {file}: its parameters come in another order than the model's "
            f"({printable(differing[0], 80)} where the model has {differing[1]}), and an optimizer's state knows its "
            "parameters by their number only"
        )


def _check_states(saved: Mapping[str, Any], optimizer: Optimizer, file: Path) -> None:
    """Refuses a state that is not of its parameter's shape, or not of plain tensors and numbers."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(type(number) is int for number in numbers) or len(set(numbers)) != len(numbers):
        raise RunError(f"--with-optimizer --from {file}: its optimizer's parameters are not numbered")
    of_number = dict(zip(numbers, parameters, strict=True))
    for number, state in saved["state"].items():
        parameter = of_number.get(number) if isinstance(number, int) else None
        if parameter is None or not isinstance(state, dict):
            raise RunError(f"--with-optimizer --from {file}: its optimizer's state is of no parameter")
        for key, value in state.items():
            why = not_plain(value) if isinstance(value, Tensor) else None
            if not (isinstance(key, str) and key.isidentifier()):
                why = "no name of an optimizer's state"
            elif not isinstance(value, Tensor | bool | int | float | None):
                why = f"of the class {type(value).__name__}"
            elif why is None and isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                why = (
                    f"{list(value.shape)}, where the parameter is {list(parameter.shape)}: grappe does not take over a "
                    "state of another shape, such as a factored one (Adafactor): leave --with-optimizer out"
                )
            if why is not None:
                raise RunError(
                    f"--with-optimizer --from {file}: {printable(str(key), 40)!r} of parameter {number} is {why}"
                )


def _epochs_done(content: Mapping[str, Any], begin: Begin) -> tuple[int, tuple[str, ...]]:
    """Returns the number of epochs done, and a note how it was found."""
    if begin.epochs_done is not None:
        return begin.epochs_done, ()
    counted: Any = content
    for key in ("loops", "fit_loop", "epoch_progress", "current", "completed"):  # Lightning's, of whole epochs
        counted = counted.get(key) if isinstance(counted, dict) else None
    if type(counted) is int:
        return counted, (f"{counted} epochs done, as Lightning counted them in the file",)
    key = next((key for key in EPOCHS if type(content.get(key)) is int), None)
    if key is None:
        raise RunError(
            f"--with-optimizer --from {begin.source}: it does not record how many epochs were done: give "
            "--epochs-done N"
        )
    done = content[key]
    return done, (f"{done} epochs done, as the file's {key!r} is understood; otherwise give --epochs-done N",)


def _going_on(
    begin: Begin, done: int, pieces: Sequence[Piece], values: Mapping[str, Mapping[str, Any]], notes: Sequence[str]
) -> ForeignTraining:
    """Returns the state after `done` epochs; `values` are the optimizer's entries that are not tensors."""
    if done < 0:
        raise RunError(f"{done} epochs done: give --epochs-done N with 0 or more")
    if done >= begin.epochs:
        raise RunError(
            f"--from {begin.source}: {done} epochs are done, and the task has epochs={begin.epochs}: nothing is left "
            f"to do. Say how many there are in all, as in epochs={done + 10}"
        )
    step = done * begin.steps_per_epoch
    engine = {"optimizer": values, "schedule_steps": step, "data_parallel": 1}
    state = {"step": step, "engine_name": begin.engine, "engine": engine}
    return ForeignTraining(epochs_done=done, pieces=pieces, state=state, notes=notes)
