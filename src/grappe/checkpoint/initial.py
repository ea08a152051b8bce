"""The weights that a training begins with: its own, a run's, or a file's."""

from __future__ import annotations

from pathlib import Path

import torch

from grappe.checkpoint.format import Checkpoint, latest
from grappe.errors import RunError
from grappe.task import Task
from grappe.weights import InFiles, InMemory, Weights, named_tensors
from grappe.world import World


def initial_weights(
    task: Task, checkpoints: Path, found: Checkpoint | None, given: Path | None, world: World
) -> Weights:
    """Where every process reads its share of the first weights from. Collective.

    Starting is resuming from step 0: process 0 builds the model once, and all read what it wrote.

    Raises:
        RunError: `given` is neither a run nor a safetensors file.
    """
    if found is not None:
        return found.tensors.under("model.")
    if given is not None:
        return _given(given)
    file = checkpoints / f".initial-{world.place.job or 'local'}.safetensors"
    if world.rank == 0:
        _build(task, file)
    world.barrier()
    weights = InFiles([file])
    world.barrier()
    if world.rank == 0:
        file.unlink()  # each process has it open; the checkpoint of step 0 keeps the values
    return weights


def built(task: Task) -> Weights:
    """The weights of a freshly made model, a function of the task's seed alone."""
    torch.manual_seed(task.seed)
    return InMemory({name: tensor.detach() for name, tensor in named_tensors(task.model()).items()})


def _build(task: Task, file: Path) -> None:
    from safetensors.torch import save_file

    weights = built(task)
    save_file({name: weights.read(name).contiguous().clone() for name in weights}, file)


def _given(given: Path) -> Weights:
    if given.is_dir():
        checkpoint = latest(given / "checkpoints")
        if checkpoint is None:
            raise RunError(f"--from {given}: there is no run with a checkpoint that verifies")
        return checkpoint.tensors.under("model.")
    if given.suffix != ".safetensors" or not given.is_file():
        raise RunError(f"--from {given}: give a run's folder or a .safetensors file")
    return InFiles([given])
