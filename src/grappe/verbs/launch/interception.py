"""Replaces what a script's training step goes through: its loaders, backwards, the values that it reads, its files."""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import gc
import io
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, get_worker_info

from grappe.data.batch import InModel
from grappe.private_api.torch import tree_map
from grappe.verbs.launch.variables import is_own_file

T = TypeVar("T")
TORCH, GRAPPE = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/"
COMPILERS = (f"{TORCH}_inductor", f"{TORCH}_dynamo", f"{Path(TORCH).parent}/triton")
BY = " by "
"""Stands in a place between the line of the script and that of the library that it calls."""
THROUGH = ("_tensor.py", "_tensor_str.py", "lr_scheduler.py", "torch/overrides.py", "launch/passes.py")
"""torch's own files through which a script reads a tensor: print(f"{loss:.4f}"), plateau.step(loss)."""
SAVED = " saved "
"""Stands in a place between the line of a torch.save and the number of the tensor in what it saves."""
INDEX = " index"
"""Ends the place of a number by which something is indexed, as a process may do with each of its rows."""
PICTURES = "torchvision/utils.py:"
"""A library's file whose numbers are the range of a picture: they are in no line of the script."""
DEPTH = 3  # frames that tell two uses of a loader apart
Begin = Callable[[], Iterator[Any]]
"""Begins an iteration of a loader, which draws random numbers."""
NUMPY_DRAWS = {
    "rand": None, "randn": None, "random": 0, "random_sample": 0, "standard_normal": 0, "normal": 2, "uniform": 2,
    "randint": 2, "binomial": 2, "choice": 1, "exponential": 1, "poisson": 1,
}  # fmt: skip
"""Functions of np.random that draw for rows, and which of their arguments is the size; None: all together."""
PLAIN_ITEM = Tensor.item
READS = ("item", "__float__", "__int__", "__index__", "__bool__", "tolist", "numpy")


PLANS_FORWARD = weakref.WeakSet[nn.Module]()
"""Modules whose `forward` is a plan's: a copy of one, or one that is saved, has its class's."""


class StepHandler:
    """A script's steps as they are; a handler overrides what it changes of what the script goes through."""

    def batches(self, loader: DataLoader[Any], place: str, begin: Begin) -> Iterator[Any]:
        """Returns what the script gets for each batch of a loader; `place` are the lines that made and use it."""
        return begin()

    def backward(self, place: str, loss: Tensor, run: Callable[[float], None]) -> float:
        """Runs a backward, whose loss is multiplied with what `run` is given; returns this process's part of it."""
        run(1.0)
        return 1.0

    def read(self, tensor: Tensor, place: str, read: Callable[[Tensor], T]) -> T:
        """Returns the value of a tensor that a line of the script reads."""
        return read(tensor)

    def length(self, value: int, tensor: object, place: str) -> int:
        """Returns the number of rows that a line of the script is told for a batch's tensor."""
        return value

    def count(self, counted: Tensor, of: int, *, special: bool) -> None:
        """Notes what a cross-entropy of `of` targets divides by: those without padding, or their classes' weights."""

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Notes an optimizer that the script has made."""


@contextlib.contextmanager
def intercepted(handler: StepHandler) -> Iterator[None]:
    """Context in which the script's steps go through `handler`."""
    with contextlib.ExitStack() as undo:

        def replace(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
            before = getattr(owner, name)
            undo.callback(setattr, owner, name, before)
            setattr(owner, name, made(before))

        replace(DataLoader, "__init__", _noting_place)
        replace(DataLoader, "__iter__", lambda plain: _iterating(plain, handler))
        replace(torch.autograd, "backward", lambda plain: _backward(plain, handler))
        for name in READS:
            replace(Tensor, name, lambda plain: _reading(plain, handler))
        replace(Tensor, "__format__", lambda plain: _formatting(plain, handler))
        replace(Optimizer, "__init__", lambda plain: _adding(plain, handler))
        for name in ("cross_entropy", "nll_loss"):
            replace(F, name, lambda plain: _counting(plain, handler))
        for name, at in NUMPY_DRAWS.items():
            replace(np.random, name, functools.partial(_drawing, at))
        replace(nn.Module, "__getstate__", _without_plans_forward)
        yield


def _noting_place(plain: Callable[..., None]) -> Callable[..., None]:
    def made(self: DataLoader[Any], *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        self.__dict__["_grappe_made_at"] = _lines(sys._getframe(1))

    return made


def _iterating(plain: Callable[[Any], Iterator[Any]], handler: StepHandler) -> Callable[[Any], Iterator[Any]]:
    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        place = "=>".join((self.__dict__.get("_grappe_made_at", ""), _lines(sys._getframe(1))))
        return handler.batches(self, place, functools.partial(plain, self))

    return iterate


def _backward(plain: Callable[..., None], handler: StepHandler) -> Callable[..., None]:
    def backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **options: Any) -> None:
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        single = isinstance(grad_tensors, Tensor) or grad_tensors is None
        factors = (grad_tensors,) if single else tuple(grad_tensors)
        if grad_tensors is None:
            factors *= len(roots)

        def run(factor: float) -> None:
            if factor == 1.0:
                plain(tensors, grad_tensors, *arguments, **options)
                return
            scaled = [
                torch.full_like(root, factor) if own is None else own * factor
                for root, own in zip(roots, factors, strict=True)
            ]
            plain(roots, scaled, *arguments, **options)

        handler.backward(place_of(sys._getframe(1)), roots[0], run)

    return backward


def _reading(plain: Callable[..., Any], handler: StepHandler) -> Callable[..., Any]:
    def read(self: Tensor, *arguments: Any, **options: Any) -> Any:
        frame = _reader(sys._getframe(1))
        if frame is None:
            return plain(self, *arguments, **options)
        if plain.__name__ == "__index__":
            return handler.read(self, place_of(frame) + INDEX, lambda _: plain(self))
        if plain.__name__ == "numpy" and not self.dim():  # a number, as by item()
            array = plain(self, *arguments, **options)
            return np.asarray(handler.read(self, place_of(frame), lambda _: array.item()), array.dtype)
        return handler.read(self, place_of(frame), lambda tensor: plain(tensor, *arguments, **options))

    return read


def _formatting(plain: Callable[..., str], handler: StepHandler) -> Callable[..., str]:
    def formatted(self: Tensor, form: str) -> str:
        frame = _reader(sys._getframe(1))
        if frame is None or self.dim() or type(self) is not Tensor:
            return plain(self, form)
        # torch formats `self.detach()`, which no longer shows of which loss it is a term.
        return format(handler.read(self, place_of(frame), PLAIN_ITEM), form)

    return formatted


def _reader(frame: FrameType | None) -> FrameType | None:
    """Returns the frame that reads a tensor; None: it is torch's or grappe's, or a dataset's where a process loads."""
    frame = beyond_torchs_own(frame)
    is_own = frame is not None and not frame.f_code.co_filename.startswith((TORCH, GRAPPE))
    return frame if is_own and get_worker_info() is None else None


def _adding(plain: Callable[..., None], handler: StepHandler) -> Callable[..., None]:
    def made(self: Optimizer, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        handler.add_optimizer(self)

    return made


def _counting(plain: Callable[..., Tensor], handler: StepHandler) -> Callable[..., Tensor]:
    def loss(output: Any, target: Any, *arguments: Any, **options: Any) -> Tensor:
        value = plain(output, target, *arguments, **options)
        settings = dict(zip(("weight", "size_average", "ignore_index", "reduce", "reduction"), arguments, strict=False))
        settings |= options
        if value.requires_grad and not target.is_floating_point() and settings.get("reduction", "mean") == "mean":
            ignored, weight = settings.get("ignore_index", -100), settings.get("weight")
            counts = target != ignored
            if weight is not None:
                counts = counts * weight[target * counts]
            handler.count(counts.sum().detach(), target.numel(), special=weight is not None or ignored != -100)
        return value

    return loss


def _drawing(at: int | None, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of np.random draw for all rows of the batch where it draws for the part's, which it returns."""

    def draw(*arguments: Any, **options: Any) -> Any:
        rows = InModel.place
        before = arguments[at : at + 1] if at is not None else (arguments,)
        size = options.get("size", before[0] if before else None)
        shape = tuple(size) if isinstance(size, list | tuple) else (size,)
        if rows is None or rows.size >= rows.of or shape[:1] != (rows.size,):
            return plain(*arguments, **options)
        every_row = (rows.of, *shape[1:])
        if at is None:
            drawn = plain(*every_row)
        elif "size" in options:
            drawn = plain(*arguments, **{**options, "size": every_row})
        else:
            drawn = plain(*arguments[:at], every_row, *arguments[at + 1 :], **options)
        return drawn[rows.first : rows.first + rows.size]

    return draw


def _without_plans_forward(plain: Callable[[nn.Module], dict[str, Any]]) -> Callable[[nn.Module], dict[str, Any]]:
    def state(self: nn.Module) -> dict[str, Any]:
        values = plain(self)
        return {key: value for key, value in values.items() if key != "forward"} if self in PLANS_FORWARD else values

    return state


# ---- Places in the script ----------------------------------------------------------------------------------


def place_of(frame: FrameType | None) -> str:
    """Returns a place in a script: file, line and columns, as a line may do several things.

    Where a library does it, its own place follows.
    """
    places = []
    while frame is not None:
        file = frame.f_code.co_filename
        if is_own_file(file) or not (places or file.startswith(TORCH)):
            places.insert(0, f"{file}:{frame.f_lineno}:{_columns(frame.f_code, frame.f_lasti)}")
        if is_own_file(file):
            break
        frame = frame.f_back
    return BY.join(places)


def is_picture(value: object, place: str) -> bool:
    """Returns whether a library reads an array, or the range of one, to draw it."""
    return BY in place and (np.ndim(value) > 0 or PICTURES in place)  # type: ignore[arg-type]


def saved_part(place: str, number: int) -> str:
    """Returns the place of one of the tensors that a line saves."""
    return "".join((place, SAVED, str(number)))


@functools.cache
def _columns(code: CodeType, instruction: int) -> str:
    """Returns the columns of an expression. Python 3.11 makes a call by another instruction once it has run often.

    Nor has it columns for each part of an f-string: there the instruction tells them apart.
    """
    _, _, first, last = next(itertools.islice(code.co_positions(), instruction // 2, None))
    part = f"+{instruction}" if dis.opname[code.co_code[instruction]].startswith("FORMAT_") else ""
    return f"{first}.{last}{part}"


def beyond_torchs_own(frame: FrameType | None) -> FrameType | None:
    """Returns the frame for which torch's own files read a tensor."""
    while frame is not None and frame.f_code.co_filename.endswith(THROUGH):
        frame = frame.f_back
    return frame


def _lines(frame: FrameType | None) -> str:
    """Returns the nearest lines of the stack that are no library's: they tell two uses of a loader apart.

    Not those before the script: a rehearsal is forked from the command, whose file in bin/ is in no library.
    """
    lines: list[str] = []
    while frame is not None and len(lines) < DEPTH and frame.f_code.co_name != "run_as_main":
        file = frame.f_code.co_filename
        if is_own_file(file):
            lines.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(reversed(lines))


# ---- Batches -----------------------------------------------------------------------------------------------


def rows_of(batch: Any) -> int | None:
    """Returns how many rows all tensors and lists of a batch have; None if they differ, or it holds anything else."""
    lengths = set(_lengths(batch))
    return lengths.pop() if len(lengths) == 1 and None not in lengths else None


def _lengths(batch: Any) -> Iterator[int | None]:
    if isinstance(batch, Tensor):
        yield len(batch) if batch.dim() else None
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _lengths(value)
    elif isinstance(batch, list | tuple) and any(isinstance(each, Tensor | Mapping | list | tuple) for each in batch):
        for value in batch:
            yield from _lengths(value)
    elif isinstance(batch, list | tuple):
        yield len(batch)  # a text for each sample
    else:
        yield None


def cut_rows(batch: Any, first: int, last: int) -> Any:
    """Returns rows `first` to `last` - 1 of a batch of which `rows_of` knows the number."""
    return _each_tensor(batch, lambda rows: rows[first:last])


def turned_rows(batch: Any, by: int) -> Any:
    """Returns a batch whose first `by` rows are its last ones."""
    return _each_tensor(batch, lambda rows: rows.roll(-by, 0) if isinstance(rows, Tensor) else [*rows[by:], *rows[:by]])


def _each_tensor(batch: Any, made: Callable[[Any], Any]) -> Any:
    """Returns a batch with what is `made` of each of its tensors and lists of samples."""
    if isinstance(batch, Tensor):
        return made(batch)
    if isinstance(batch, Mapping):
        parts = {name: _each_tensor(value, made) for name, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
    if any(isinstance(each, Tensor | Mapping | list | tuple) for each in batch):
        several = [_each_tensor(value, made) for value in batch]
        return type(batch)(*several) if hasattr(batch, "_fields") else type(batch)(several)
    return made(batch)


def copied(value: Any) -> Any:
    """Returns a copy of a batch's or an output's tensors, in the same nesting."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def parameters_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Returns the parameters of optimizers that are trained, each once."""
    every = (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
    return [each for each in {id(each): each for each in every}.values() if each.requires_grad]


def add_gradient(total: dict[int, Tensor], number: int, gradient: Tensor) -> None:
    """Adds a gradient to the total of parameter `number`."""
    total[number] = total[number] + gradient if number in total else gradient.clone()


def norms_of(total: Mapping[int, Tensor], count: int) -> list[float]:
    """Returns |gradient| of each of `count` parameters; 0 where there is none."""
    return [float(total[number].double().norm()) if number in total else 0.0 for number in range(count)]


def modules_alive() -> list[nn.Module]:
    """Returns all modules of the process: a script's models are in no place that is known."""
    return alive(nn.Module)


def buffers_alive() -> list[Tensor]:
    """Returns the buffers of all modules of the process."""
    return [buffer for module in modules_alive() for buffer in module.buffers(recurse=False)]


def alive(kind: type[T]) -> list[T]:
    """Returns all objects of a class; asks their types, as some objects warn when they are asked for their class."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


# ---- Files of other processes ------------------------------------------------------------------------------


def _compiles(frame: FrameType | None) -> bool:
    """Returns whether a file is opened to compile: each process needs its own."""
    while frame is not None and not frame.f_code.co_filename.startswith(COMPILERS):
        frame = frame.f_back
    return frame is not None


class _Nowhere(io.FileIO):
    """The null device with the places and the length of a file."""

    _at = _length = 0

    def write(self, written: Any) -> int:
        count = super().write(written)
        self._at += count
        self._length = max(self._length, self._at)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self._length = self._at if size is None else size
        return self._length


@contextlib.contextmanager
def writing_nothing(*, until_left: bool = False) -> Iterator[None]:
    """Context of a process that leaves files to another: what it opens for writing goes nowhere.

    Args:
        until_left: whether a file that is still open at the end is written from then on, after what it holds.
    """
    plain, make = builtins.open, os.mkdir
    left: list[tuple[Any, str]] = []

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        written = not isinstance(file, int) and set(mode) & set("wax+") and os.fspath(file) != os.devnull
        if not written or _compiles(sys._getframe(1)):
            return plain(file, mode, *arguments, **options)
        if "b" in mode:  # it may be an archive's, which asks where it is
            nowhere = _Nowhere(os.devnull, "r+")
            stream: Any = io.BufferedRandom(nowhere) if "+" in mode else io.BufferedWriter(nowhere)
        else:
            stream = plain(os.devnull, mode.replace("x", "w"), *arguments, **options)
        left.append((stream, os.path.abspath(os.fspath(file))))  # noqa: PTH100 - of any kind
        return stream

    def made(*arguments: Any, **options: Any) -> None:
        with contextlib.suppress(FileExistsError):
            make(*arguments, **options)

    save, is_left = torch.save, False  # which opens files in C++

    def saved(*arguments: Any, **options: Any) -> None:
        if is_left:  # by way of what has been put around this one meanwhile
            save(*arguments, **options)

    builtins.open = io.open = opened  # type: ignore[assignment]
    os.mkdir, torch.save = made, saved
    try:
        yield
    finally:
        builtins.open = io.open = plain
        os.mkdir, is_left = make, True
        if torch.save is saved:
            torch.save = save
        for stream, file in left if until_left else ():
            if not stream.closed:
                stream.flush()
                handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                os.dup2(handle, stream.fileno())
                os.close(handle)


@contextlib.contextmanager
def appending_undone() -> Iterator[dict[str, int | None]]:
    """Context of a process whose script will run again in another: what it appends to files is taken away.

    Yields:
        What is undone: the lengths that files had, by path; None: there was none.
    """
    lengths: dict[str, int | None] = {}

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not isinstance(arguments[0], int) and arguments[2] & os.O_APPEND:
            file = Path(os.fsdecode(arguments[0])).absolute()
            lengths.setdefault(str(file), file.stat().st_size if file.exists() else None)

    sys.addaudithook(note)  # for ever: a function in place of `open` would be in the script's tracebacks
    yield lengths
    for file, length in lengths.items():
        with contextlib.suppress(OSError):
            if length is None:
                Path(file).unlink()
            else:
                os.truncate(file, length)
