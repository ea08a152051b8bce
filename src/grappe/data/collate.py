"""Collate: calls a task's functions on batches, and checks their results: a pair (inputs, targets), of any form."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grappe.data.arrays import native
from grappe.data.seeded import seeded
from grappe.errors import GrappeError, PlanError, TaskError
from grappe.errors.user_code import sentence
from grappe.errors.user_line import at
from grappe.private_api.torch import tree_leaves, tree_map
from grappe.task import Task, overrides

COLLATE = "def collate(self, samples): … return inputs, targets"  # as it is to be written, for messages


def collated(task: Task, samples: Sequence[Any]) -> tuple[Any, Any]:
    """The batch (inputs, targets) of samples of whatever form.

    Raises:
        TaskError: the result is no such pair, or the samples cannot be put together.
    """
    name = type(task).__name__
    key = getattr(samples, "key", None) if overrides(task, "collate") else None
    by_itself = not overrides(task, "collate")
    if by_itself and any(isinstance(leaf, np.ma.MaskedArray) for leaf in tree_leaves(samples[0])):
        samples = tree_map(native, list(samples))  # torch would take what lies under the mask
    try:
        with contextlib.nullcontext() if key is None else seeded(key):
            try:
                batch = task.collate(samples)
            except ValueError:  # an array that was flipped, or has another byte order
                if not by_itself:
                    raise
                batch = task.collate(tree_map(native, list(samples)))
    except GrappeError:
        raise
    except Exception as error:
        described = explained(error)
        if described is not error:  # default_collate allocates a worker's batch there
            raise described from error
        if overrides(task, "collate"):
            raise TaskError(f"{name}.collate() failed: {sentence(error)}") from error
        text = str(error).partition("\n")[0]
        raise TaskError(
            f"samples of the form {form(samples[0])} cannot be put together by themselves ({type(error).__name__}: "
            f"{text}): give {name} a {COLLATE}{at(task, 'data')}"
        ) from error
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if overrides(task, "collate"):
        raise TaskError(
            f"{name}.collate() gave {form(batch)}: it must give a pair, `return inputs, targets`{at(task, 'collate')}"
        )
    raise TaskError(
        f"samples of the form {form(samples[0])} do not show which part is input and which is target: let data() "
        f"give pairs (input, target), or give {name} a {COLLATE}{at(task, 'data')}"
    )


def augment(task: Task, inputs: Any, targets: Any, keys: Tensor, *, training: bool = True) -> tuple[Any, Any]:
    """The task's augmentation of a batch."""
    with _in_full_precision(keys.device):
        if takes_training(task):
            batch = task.augment(inputs, targets, keys, training=training)  # type: ignore[call-arg]
        else:
            batch = task.augment(inputs, targets, keys)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise TaskError(
        f"{type(task).__name__}.augment() gave {form(batch)}: it must give a pair, `return inputs, targets`"
        + at(task, "augment")
    )


@contextlib.contextmanager
def _in_full_precision(device: torch.device) -> Iterator[None]:
    """Context without the model's lower precision: an augmentation has the same bits under every plan.

    Evaluation asks for batches inside the model's autocast; precision=tf32 rounds every product of matrices to 11 bits.
    """
    if device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
        yield
        return
    matmul = torch.backends.cuda.matmul
    try:
        name, before, full = "allow_tf32", matmul.allow_tf32, False
    except RuntimeError:  # from torch 2.9 on: a task has set the newer name, so the older one cannot be read
        name, before, full = "fp32_precision", matmul.fp32_precision, "ieee"
    setattr(matmul, name, full)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        setattr(matmul, name, before)


def in_float64(batch: Any) -> Any:
    """Returns nested data, whose decimal tensors are float64."""
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def takes_training(task: Task) -> bool:
    """Returns whether the task's `augment` takes `training`: it changes batches of evaluations, too."""
    return _has_training(getattr(task.augment, "__func__", task.augment))


@functools.lru_cache(maxsize=64)
def _has_training(augment: Callable[..., Any]) -> bool:
    return "training" in inspect.signature(augment).parameters


def form(value: Any, depth: int = 2) -> str:
    """Describes the form of a sample or batch in a few words: `(Tensor [3, 8, 8], int)`."""
    if isinstance(value, dict):
        inside = [f"{key!r}: {form(item, depth - 1)}" for key, item in list(value.items())[:4]] if depth else ["…"]
        return "{" + ", ".join(inside) + (", …" if depth and len(value) > 4 else "") + "}"
    if isinstance(value, tuple | list):
        inside = [form(item, depth - 1) for item in value[:4]] if depth else ["…"]
        words = ", ".join(inside) + (", …" if depth and len(value) > 4 else "")
        if isinstance(value, list):
            return f"[{words}]"
        return f"({words},)" if len(value) == 1 else f"({words})"
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" {list(shape)}" if isinstance(shape, tuple) else "")


SHARED_MEMORY = "/dev/shm"
FULL_MEMORY = ("No space left on device (28)", "out of shared memory")
"""In what torch raises: in a worker that allocates, and in the process whose worker was ended by SIGBUS."""


def explained(error: BaseException) -> BaseException:
    """Returns an error that says what to do, if `error` comes from a full /dev/shm or too many files; else `error`."""
    if "Too many open files" in str(error) or f"exit code {errno.EMFILE}." in str(error):
        return PlanError(
            "a data worker has too many open files (ulimit -n), one for each tensor that it hands over: take "
            "workers=0, or loading=threads, or a higher limit"
        )
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if not full and not any(word in str(error) for word in FULL_MEMORY):
        return error
    return PlanError(
        f"{SHARED_MEMORY} is full, through which data workers hand over their samples: take workers=0, or "
        "loading=threads, or fewer workers, or give the container more (docker --shm-size=1g, --ipc=host)"
    )


def is_half_free() -> bool:
    """Returns whether twice as many data workers would have room there, as an estimate."""
    try:
        room = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return True
    return room.free >= room.total / 2


def at_rows(batch: Any, places: Sequence[int], count: int) -> Any:
    """The rows `places` of a batch of `count` samples; numbers and words of the whole batch stay as they are.

    Raises:
        PlanError: something in it has no row for each sample.
    """
    if isinstance(batch, Tensor) and batch.dim():
        if len(batch) == count:
            return batch[torch.tensor(places, dtype=torch.int64, device=batch.device)]
        raise PlanError(f"{_WHY}: a tensor has {list(batch.shape)} for {count} samples. {_INSTEAD}")
    if isinstance(batch, Mapping):
        taken = {key: at_rows(value, places, count) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return taken
        own = copy.copy(batch)  # of a tokenizer, whose fields are attributes, too
        own.update(taken)
        return own
    if isinstance(batch, list) and len(batch) == count:
        columns = all(isinstance(value, Tensor) and value.dim() and len(value) == count for value in batch)
        if not columns:  # single samples
            return [batch[place] for place in places]
    if isinstance(batch, tuple | list):
        parts = [at_rows(value, places, count) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if batch is None or isinstance(batch, Tensor | str | int | float | bool):
        return batch
    raise PlanError(f"{_WHY}: there is a {type(batch).__name__} in it. {_INSTEAD}")


def row_shapes(batch: Any, rows: int) -> frozenset[tuple[int, ...]]:
    """Returns the shapes, without their rows, of tensors that have a row for each sample."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return frozenset(tuple(leaf.shape[1:]) for leaf in leaves if len(leaf) == rows)


def begins_with(padded: Any, batch: Any) -> bool:
    """Returns whether a batch's values are those of another one, with more padding behind them."""
    longer, shorter = tree_leaves(padded), tree_leaves(batch)
    return len(longer) == len(shorter) and all(
        long.shape[:1] == short.shape[:1] and torch.equal(long[tuple(map(slice, short.shape))], short)
        for long, short in zip(longer, shorter, strict=True)
        if isinstance(long, Tensor) and isinstance(short, Tensor) and long.dim() == short.dim() > 0
    )


_WHY = "a pipeline cuts each batch into microbatches, row by row, and what collate() gave cannot be cut so"
_INSTEAD = "Give tensors with a row for each sample, or use replicate= or shard="
