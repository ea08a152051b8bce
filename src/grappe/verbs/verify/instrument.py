"""Instruments a user's task: records samples, finds and switches off what may make plans differ."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from grappe.data.arrays import Arrays, in_memory
from grappe.data.batch import counts_of, inside
from grappe.data.collate import augment as augmented
from grappe.data.collate import collated
from grappe.data.datasets import dataset_of
from grappe.data.sampling import Sampling
from grappe.data.seeded import missing
from grappe.data.stream import repeatable_head
from grappe.engines.shared.carried import attributes_kept
from grappe.parallel.batchnorm import Kept, buffers_kept, kept_buffers, replace_buffers
from grappe.private_api.torch import BatchNormBase, tree_flatten, tree_leaves, tree_map
from grappe.rows.tensor import full
from grappe.step.loss import loss_of
from grappe.task import Call, Task, derived, overrides
from grappe.training.checked_steps import functions_over_rows
from grappe.training.interception import copied
from grappe.verbs.verify.random_ops import RandomOps

NO_CLIP = 1e30  # engines compute the gradient's norm where there is a bound; this one is never reached
EPOCH_STEPS = 3  # whole batches in an epoch of a trial; a short odd one follows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instrumentation:
    """The parts that are switched off, both under the plan and in the plain process; nothing by default."""

    without_randomness: bool = False
    """Random numbers drawn in the model are replaced by their mean."""
    evaluated_modules: tuple[str, ...] = ()
    """Modules that couple a batch's samples while training, to be run as in evaluation."""
    loss_row_by_row: bool = False
    """The loss is computed row by row, so that no row can enter another's."""
    without_augmentation: bool = False
    """No augmentation."""
    constant_buffers: bool = False
    """Every forward starts with the initial buffers."""
    in_float32: bool = False
    """The forward runs in float32, also inside autocast."""
    without_clipping: bool = False
    """The gradient is not clipped."""
    batch_multiple: int = 0
    """Every batch has a multiple of this number of samples, without weights, so that all slices have one size."""
    loaded_samples: tuple[Any, ...] = ()
    """Samples loaded before, which replace the dataset."""


NOTHING = Instrumentation()


class SampleRecorder:
    """Records the ids of the samples that reached the loss in this process; ids are part of the targets."""

    def __init__(self) -> None:
        self._calls: list[Tensor] = []

    def record(self, ids: Tensor) -> None:
        """Records a call of the loss."""
        self._calls.append(full(ids).detach())  # a loss of the whole batch has the rows of all processes

    def take(self, rows: Sequence[int]) -> list[int]:
        """Returns the ids of a finished step, whose microbatches have `rows` rows; padding rows have no id."""
        calls, self._calls = self._calls, []
        # An engine may make a dry run before its first step, and may leave out empty microbatches.
        expected = list(rows) if len(calls) >= len(rows) else [row_count for row_count in rows if row_count]
        calls = calls[len(calls) - len(expected) :]
        # A pipeline's padding rows follow the others.
        return [i for ids, real in zip(calls, expected, strict=False) for i in ids.tolist()[:real]]


def instrumented(task: Task, instrumentation: Instrumentation, recorder: SampleRecorder) -> Task:
    """Makes a task of a class derived from the user's: the same for every engine, except for `instrumentation`.

    The data is a part of the user's: three batches and a short one per epoch, evenly spread, each sample's id
    in its target.
    """

    def data(self: Task, split: str, folder: Path) -> Dataset:
        dataset: Any = repeatable_head(
            lambda: dataset_of(task, split, folder),
            (EPOCH_STEPS + 1) * _multiple(task.batch_size, instrumentation.batch_multiple or 1),
        )
        index = _trial_rows(task, instrumentation, len(dataset))
        arrays = in_memory(dataset)
        if arrays is None or instrumentation.loaded_samples:
            return Subset(dataset, index, instrumentation.loaded_samples)
        inputs, targets = arrays.stored(index)
        trial = Arrays(inputs, (targets, torch.arange(len(index))), transform=arrays.transform)
        trial.whole = dataset  # type: ignore[attr-defined]
        return trial

    def sampling(self: Task, dataset: Any) -> Sampling | None:
        asked = task.sampling(dataset.whole)
        if asked is None:
            return None
        index = _trial_rows(task, instrumentation, len(dataset.whole))
        columns: dict[str, Any] = {
            name: None if (column := getattr(asked, name)) is None else np.asarray(column)[index]
            for name in ("weights", "classes", "lengths")
        }
        return dataclasses.replace(asked, samples=None, **columns)

    def collate(self: Task, samples: Sequence[Any]) -> Any:
        inputs, targets = collated(task, [sample for sample, _ in samples])
        return inputs, (targets, torch.tensor([place for _, place in samples]))

    def augment(self: Task, inputs: Any, targets: Any, keys: Tensor, training: bool = True) -> tuple[Any, Any]:
        if instrumentation.without_augmentation:
            return inputs, targets
        inputs, target = augmented(task, inputs, targets[0], keys, training=training)
        return inputs, (target, targets[1])

    def counts(self: Task, target: Any) -> Any:
        counts = counts_of(task, target[0])
        if not instrumentation.batch_multiple or not isinstance(counts, Mapping):
            return None if instrumentation.batch_multiple else counts
        return {name: torch.ones_like(values) for name, values in counts.items()}  # several shapes

    def loss(self: Task, output: Any, target: Any) -> Any:
        target, ids = target
        recorder.record(ids)
        if not instrumentation.loss_row_by_row or not all_rows((output, target), len(ids)):  # boxes, nodes
            return task.loss(output, target)
        rows = (tree_map(lambda leaf, i=i: leaf[i : i + 1], (output, target)) for i in range(len(ids)))
        losses = [loss_of(task, *row) for row in rows]
        if not losses[0].named:
            return torch.cat([row.values for row in losses])
        return {name: torch.cat([row.named[name] for row in losses]) for name in losses[0].named}

    def model(self: Task) -> nn.Module:
        made = task.model()
        for name, module in made.named_modules():
            if name in instrumentation.evaluated_modules:
                module.register_forward_pre_hook(_evaluate)
        if instrumentation.constant_buffers:
            made.register_forward_pre_hook(_RestoredBuffers())
        if instrumentation.in_float32:
            made.forward = _in_float32(made.forward)  # type: ignore[method-assign]
        return made

    def domain(self: Task, inputs: Any, targets: Any) -> Any:
        of_inputs, of_targets = task.domain(inputs, targets[0])
        return of_inputs, (of_targets, None)

    kind = type(task)
    always, where_overridden = (data, loss, model, collate), (counts, augment, sampling, domain)
    for method in always:
        method.__wrapped__ = getattr(kind, method.__name__)  # type: ignore[attr-defined] # messages name the user's line
    methods = (*always, *(method for method in where_overridden if overrides(task, method.__name__)))
    made = derived(task, **{method.__name__: method for method in methods})
    if instrumentation.without_clipping or task.clip is None:
        made.__dict__["clip"] = NO_CLIP
    if instrumentation.batch_multiple:
        made.__dict__["batch_size"] = _multiple(task.batch_size, instrumentation.batch_multiple)
    return made


def all_rows(batch: Any, rows: int) -> bool:
    """Returns whether all leaves are tensors of the batch's length."""
    return all(isinstance(leaf, Tensor) and bool(leaf.dim()) and len(leaf) == rows for leaf in tree_leaves(batch))


def _multiple(number: int, of: int) -> int:
    """Rounds up."""
    return -(-number // of) * of


def _evaluate(module: nn.Module, _: Any) -> None:
    module.eval()


def _trial_rows(task: Task, instrumentation: Instrumentation, available: int) -> np.ndarray:
    """Chooses a trial's samples from the dataset, evenly spread; an epoch's last batch is short, so slices are uneven.

    Their number is odd if the dataset's is: then a plan with many pieces has a row that is alone in its piece, which
    some models do not support.
    """
    batch = _multiple(task.batch_size, instrumentation.batch_multiple or 1)
    if instrumentation.batch_multiple:
        length = max(batch, min(available, EPOCH_STEPS * batch) // batch * batch)
    else:
        pairs = batch // 4 | 1
        length = min(available, EPOCH_STEPS * batch + min(2 * pairs - available % 2, batch - 1))
    return np.arange(length) * available // length


class Subset(Dataset):
    """A few of a dataset's samples, of any form, each with its position as its id: (sample, id)."""

    def __init__(self, dataset: Any, index: np.ndarray, loaded: Sequence[Any]) -> None:
        self.whole, self._index, self._loaded = dataset, index, loaded

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self._loaded:
            return self._loaded[index], index
        sample = self.whole[int(self._index[index])]
        if sample is None:
            raise missing(self.whole, int(self._index[index]))
        return sample, index


class _RestoredBuffers:
    """Module that restores the buffers before each forward, as new tensors: a backward may still read the old ones."""

    def __init__(self) -> None:
        self._kept: Kept = []

    def __call__(self, module: nn.Module, _: Any) -> None:
        self._kept = self._kept or kept_buffers(module)
        replace_buffers(self._kept)


def _in_float32(forward: Any) -> Any:
    def plain(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        args, kwargs = tree_map(
            lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, (args, kwargs)
        )
        with torch.autocast(kind, enabled=False):
            return forward(*args, **kwargs)

    return plain


# ---- What couples samples ------------------------------------------------------------------------------------

RELATIVE = 1e-4
"""Rounding makes 1e-7 of a difference, batch statistics of half a batch a tenth."""
FEWEST_ROWS = 4


@torch.no_grad()
def batch_coupling(
    model: nn.Module, call: Call, part: Callable[[int, int], Any], rows: int
) -> tuple[dict[str, str], bool]:
    """Finds batch normalisations, and the user's lines that compute over several samples while the model trains.

    Args:
        call: the task's forward.
        part: returns the inputs of the rows from one number to another, as a batch of their own.

    Returns:
        The class of each by the module's name, or the function by the line, {"": the model's class} where neither is
        found; and whether each row of the output is known to depend only on its own row of the input.
    """
    if rows < FEWEST_ROWS:
        return {}, False
    model = copy.deepcopy(model).train()
    coupled = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and module.training
    }
    with RandomOps(off=True), inside(None):
        couples = bool(coupled) or _couples(model, call, part, rows)
        if couples is not False:
            coupled |= functions_over_rows(functools.partial(call, model), part(0, rows))
    return coupled or ({"": type(model).__name__} if couples else {}), couples is False


def _couples(model: nn.Module, call: Call, part: Callable[[int, int], Any], rows: int) -> bool | None:
    """Returns whether the outputs of the first half of the rows change without the second half; None: unknown."""
    outputs = []
    try:
        for end in (rows, rows // 2):
            with buffers_kept(model), attributes_kept(model):
                outputs.append(tree_leaves(call(model, copied(part(0, end)))))  # what works in place changes them
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None
    for output, half in zip(*outputs, strict=False):
        if not isinstance(output, Tensor) or not output.is_floating_point() or not half.numel():
            continue
        differ = [dim for dim, (a, b) in enumerate(zip(output.shape, half.shape, strict=False)) if a != b]
        head = output.narrow(differ[0], 0, half.shape[differ[0]]) if differ else output
        if head.shape != half.shape:
            return None
        most = float(head.abs().max())
        if math.isfinite(most) and not torch.allclose(head, half, rtol=RELATIVE, atol=RELATIVE * most):
            return True
    return False
