"""Makes a training's initial weights in a separate process, and saves them as step 0."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from grappe.checkpoint import tensor_file
from grappe.checkpoint.choice import choose
from grappe.checkpoint.commit import Origin, commit, write_new
from grappe.checkpoint.foreign import foreign_weights
from grappe.checkpoint.format import STATE, step_folder
from grappe.checkpoint.names import LOCAL, MODEL
from grappe.checkpoint.tensor_file import Piece
from grappe.checkpoint.weights import InMemory, Weights, named_tensors
from grappe.errors import RunError, TaskError
from grappe.launch import files as safe
from grappe.launch.files import IN_PART, IN_RUN
from grappe.launch.fork import run_in_fork
from grappe.task import Task


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
        _take_over(model, _given_weights(given), given)
    _save(model, checkpoints, run)


def _made(task: Task) -> nn.Module:
    torch.manual_seed(task.seed)
    model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"{type(task).__name__}.model() returned {type(model).__name__}: return an nn.Module")
    return model


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
        print(f"grappe: --from {given}: {found}", file=sys.stderr, flush=True)
    return found.checkpoint.read_model()


@torch.no_grad()
def _take_over(model: nn.Module, weights: Weights, given: Path) -> None:
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
            tensor.copy_(weights.read(name))


def _some(names: list[str]) -> str:
    return (", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "none"
