"""Makes a training's initial weights in a separate process, and saves them as step 0."""

from __future__ import annotations

import mmap
import secrets
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from grappe.checkpoint import tensor_file
from grappe.checkpoint.choice import choose
from grappe.checkpoint.commit import Origin, commit, write_new
from grappe.checkpoint.foreign import ALONE, foreign_weights
from grappe.checkpoint.format import STATE, step_folder
from grappe.checkpoint.names import LOCAL, MODEL
from grappe.checkpoint.tensor_file import Piece
from grappe.checkpoint.weights import InMemory, Weights, named_tensors
from grappe.errors import GrappeError, RunError, TaskError
from grappe.errors.foreign_text import printable
from grappe.errors.user_code import at, user_call
from grappe.launch import files as safe
from grappe.launch.files import IN_PART, IN_RUN
from grappe.launch.fork import run_in_fork
from grappe.launch.limits import LimitReached, Limits
from grappe.launch.terminal import complain
from grappe.task import Task

SLACK = 1 << 26  # bytes, for what is not weights: names, headers, torch's own
LEAST_SECONDS = 3
BYTES_PER_SECOND = 10**8  # of a file that is read, and copied into the model


def build(task: Task, checkpoints: Path, given: Path | None, run: str = "") -> None:
    """Makes the model in a separate process and saves it as step 0; the memory of building is freed with that process.

    Args:
        given: a run or a file to take the weights from, instead of fresh ones.
        run: the id of the run that it is for.

    Raises:
        GrappeError: the model cannot be made, or `given` does not fit it.
    """
    run_in_fork(lambda: _build(task, checkpoints, given, run))


def built(task: Task) -> Weights:
    """Returns the weights of a freshly made model, a function of the task's seed alone."""
    return InMemory({name: tensor.detach() for name, tensor in named_tensors(_made(task)).items()})


def _build(task: Task, checkpoints: Path, given: Path | None, run: str) -> None:
    torch.set_num_threads(1)  # a forked process must not use its parent's threads
    model = _made(task)
    if given is not None:
        take_over(model, given)
    _save(model, checkpoints, run)


def _made(task: Task) -> nn.Module:
    torch.manual_seed(task.seed)
    model = user_call(task, "model")
    check_model(task, model)
    return model


def check_model(task: Task, model: object) -> None:
    """Raises TaskError where what `task.model()` returned cannot be trained."""
    name, place = f"{type(task).__name__}.model()", at(task, "model")
    if not isinstance(model, nn.Module):
        raise TaskError(f"{name} returned {type(model).__name__}: return an nn.Module{place}")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TaskError(
            f"{name} returned a {type(model).__name__}: return the module in it; the plan spreads it, as in --plan "
            f"replicate=2{place}"
        )
    lazy = [key for key, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise TaskError(
            f"{name} has parameters without a shape ({_some(lazy)}): give lazy layers their sizes, as in "
            f"nn.Linear(3, 4), or call the model once in model(){place}"
        )


def _save(model: nn.Module, checkpoints: Path, run: str = "") -> None:
    pieces = [_piece(f"{MODEL}{name}", value) for name, value in model.named_parameters()]
    pieces += [_piece(f"{LOCAL}0.{name}", value) for name, value in model.named_buffers()]
    beside = checkpoints / f".step-000000.{secrets.token_hex(8)}"
    checkpoints.parent.mkdir(parents=True, exist_ok=True)
    safe.make_folder(checkpoints, IN_RUN)
    safe.make_folder(beside, IN_PART)
    files = {"rank-0.safetensors": tensor_file.write(beside / "rank-0.safetensors", pieces)}
    files[STATE] = write_new(beside / STATE, b'{"step": 0}')
    commit(beside, step_folder(checkpoints, 0), files, Origin(step=0, run=run))


def _piece(name: str, tensor: Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(name, tensor.detach().cpu(), shape, (0,) * len(shape))


def _given_weights(given: Path) -> Weights:
    if not given.is_dir():
        return foreign_weights(given)
    found = choose(given / "checkpoints")
    if found.checkpoint is None:
        why = f": {found.passed_over[0]}" if found.passed_over else ""
        raise RunError(f"--from {given}: there is no run with a checkpoint that verifies{why}")
    if found.passed_over:
        complain(f"grappe: --from {given}: {found}")
    return found.checkpoint.read_model()


def take_over(model: nn.Module, given: Path) -> None:
    """Reads the weights in `given` into the model, by a process that may take as much memory as the model does.

    Raises:
        RunError: they are not this model's, or `given` is damaged or hostile.
    """
    own = sum(tensor.nbytes for tensor in share_memory(model))
    size = _size(given)
    limits = Limits(memory=own + SLACK, mapped=size + SLACK, seconds=LEAST_SECONDS + size // BYTES_PER_SECOND)
    try:
        run_in_fork(lambda: _copied(model, given), limits)
    except LimitReached as error:
        raise RunError(
            f"--from {given}: refused, since {error}, and the model's weights are {own / 1e6:,.1f} MB: {ALONE}"
        ) from None


def _copied(model: nn.Module, given: Path) -> None:
    try:
        _copy(model, _given_weights(given), given)
    except GrappeError:
        raise
    except Exception as error:  # a file of a stranger's may lead to any
        kind = type(error).__name__
        raise RunError(
            f"--from {given}: it holds no weights that can be read ({kind}: {str(error)[:300]}): {ALONE}"
        ) from error


def share_memory(model: nn.Module) -> list[Tensor]:
    """Moves the model's tensors to memory that forked processes share; returns them.

    Anonymous memory: /dev/shm, where torch would have them, is small in many a container.
    """
    tensors = list(named_tensors(model).values())
    for tensor in tensors:
        if tensor.nbytes:
            shared = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
            tensor.data = shared.copy_(tensor.detach())
    return tensors


def _size(given: Path) -> int:
    """Returns the bytes that reading `given` may map."""
    if not given.is_dir():
        return given.stat().st_size if given.is_file() else 0
    files = given.glob("checkpoints/*/*.safetensors")
    return sum(file.lstat().st_size for file in files if safe.kind(file) == "file")


@torch.no_grad()
def _copy(model: nn.Module, weights: Weights, given: Path) -> None:
    mine = named_tensors(model)
    missing = [name for name in dict(model.named_parameters()) if name not in weights]
    strangers = [name for name in weights if name not in mine]
    if missing or strangers:
        raise RunError(
            f"--from {given}: its parameter names differ from this model's. "
            f"Missing: {_some(missing)}. Left over: {_some(strangers)}"
        )
    for name, tensor in mine.items():
        if name in weights:
            if weights.shape(name) != tuple(tensor.shape):
                shapes = f"{list(weights.shape(name))} there, {list(tensor.shape)} in the model"
                raise RunError(f"--from {given}: {name} is {shapes}")
            value = weights.read(name)
            if _kind(value.dtype) != _kind(tensor.dtype):
                kinds = f"{value.dtype} there, {tensor.dtype} in the model".replace("torch.", "")
                raise RunError(f"--from {given}: {name} is {kinds}")
            tensor.copy_(value)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex or dtype.is_floating_point:
        return "complex" if dtype.is_complex else "decimal"
    return "truth" if dtype == torch.bool else "whole"


def _some(names: list[str]) -> str:
    return (
        ", ".join(printable(name, 80) for name in names[:5])
        + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    ) or "none"
