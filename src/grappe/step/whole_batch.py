"""WholeBatchLosses: the loss of a task that compares samples, over the global batch, under any plan.

The outputs of all processes are gathered, without gradients. Each process computes the loss of all, and its gradient
with respect to its own rows: the processes' gradients then sum to that of the whole loss, without communication in
backward. Several microbatches need a first pass without gradients, which gives their outputs, and a second one with
these gradients (GradCache: Gao, Zhang, Han and Callan, "Scaling deep contrastive learning batch size under memory
limited setup", 2021, arXiv 2101.06983).

Shapes: a global batch of B rows, b of them in this process's slice, its microbatches one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grappe.data.batch import Batch, Microbatch
from grappe.errors import TaskError
from grappe.errors.user_code import at
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import tree_flatten, tree_leaves, tree_unflatten
from grappe.profiling.phases import BACKWARD
from grappe.step.gathered_slices import GatheredSlices
from grappe.step.losses import Loss, Losses, Scored, values_of
from grappe.step.observers import Observers
from grappe.task import Task


class Part(NamedTuple):
    """The part of the whole batch's loss that belongs to a microbatch."""

    gradients: tuple[Tensor | None, ...]
    """Of the microbatch's output, by leaf, rows of padding included; None: the loss does not depend on the leaf."""
    scored: Scored
    """The sums of the losses of the microbatch's samples."""


def losses_of(
    task: Task,
    plan: Plan,
    world: World,
    observers: Observers | None = None,
) -> AnyLosses:
    """Makes what computes the task's loss under the plan."""
    if task.whole_batch_loss:
        return WholeBatchLosses(task, plan, world, observers)
    return Losses(task, observers)


class WholeBatchLosses:
    """Calls `task.loss` with the outputs and targets of the global batch. Collective over the data slices.

    Args:
        observers: called with BACKWARD, and with the output, once the loss of a training microbatch is known.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        world: World,
        observers: Observers | None = None,
    ) -> None:
        self._task, self._plan = task, plan
        self._on_phase = observers.phase if observers is not None else None
        self._on_output = observers.output if observers is not None else None
        self._slices = GatheredSlices(plan, world)
        # Exact plans add up in the order of their pieces, on one process too.
        self._whole_here = world.size == 1 and not plan.exact
        self._checked = False
        self._ahead: dict[int, tuple[Microbatch, Part]] = {}
        """By the microbatch's identity; it is kept, so that no later one can have the identity of one left out."""
        self._waiting: list[Any] = []
        """Outputs of an evaluation's batch whose other microbatches are not there yet."""

    def look_ahead_needed(self, batch: Batch) -> bool:
        """Returns whether a first pass must give all outputs; the same on every process.

        Also where a slice has no sample: some engines leave out what has none, and would not take part in gathering.
        """
        return len(batch.microbatches) > 1 or self._slices.has_empty(batch.samples)

    def look_ahead(self, batch: Batch, outputs: Sequence[Any], scale: float) -> None:
        """Takes the outputs of a step's microbatches, from the first pass. Collective."""
        parts = self._parts(batch, outputs, scale)
        self._ahead = {
            id(micro): (micro, part) for micro, part in zip(batch.microbatches, parts, strict=True)
        }

    def __call__(self, output: object, micro: Microbatch, batch: Batch, scale: float = 1.0) -> Loss:
        """Computes the loss of a microbatch of `batch`: `values` is its output, flattened.

        Collective, but after `look_ahead`.

        Args:
            scale: factor of the output gradient: the loss scale, or a later divisor of the gradients.

        Raises:
            TaskError: the loss is a mean, or the output has neither rows nor scalars.
        """
        if self._whole_here and len(batch.microbatches) == 1:
            return self._direct(output, micro, batch, scale)
        _, part = self._ahead.pop(id(micro), (micro, None))
        tried = part is None and len(batch.microbatches) > 1
        if part is None:
            [part] = [self._dry(output, micro)] if tried else self._parts(batch, [output], scale)
        if self._on_output is not None and not tried:
            self._on_output(output, micro, part.scored.named)
        if self._on_phase is not None:
            self._on_phase(BACKWARD)
        leaves, _ = tree_flatten(output)
        reached = [
            (leaf.reshape(-1).float(), gradient.reshape(-1).float())
            for leaf, gradient in zip(leaves, part.gradients, strict=True)
            if gradient is not None and leaf.requires_grad
        ]
        if not reached:
            raise TaskError(f"{type(self._task).__name__}.loss() does not depend on the model's weights")
        values, gradients = zip(*reached, strict=True)
        return Loss(torch.cat(values), torch.cat(gradients), part.scored.total)

    def _direct(self, output: object, micro: Microbatch, batch: Batch, scale: float) -> Loss:
        """Computes the loss of a global batch that is here whole; backward goes through it, as through any loss."""
        if not self._checked:  # what any other plan would refuse
            self._whole([micro], [output], "the model's output")
            self._check_targets([micro])
            self._whole([micro], [micro.targets], "the target")
            self._checked = True
        weights = self._weights(micro)
        values, named = values_of(self._task, output, micro.targets, micro.size, weights)
        if not values.requires_grad:
            raise TaskError(f"{type(self._task).__name__}.loss() does not depend on the model's weights")
        if self._on_output is not None:
            totals = {name: Losses.total(one, micro, micro.rows) for name, one in named.items()}
            self._on_output(output, micro, totals)
        if self._on_phase is not None:
            self._on_phase(BACKWARD)
        start = _start(values, batch, weights, scale)
        return Loss(values, start, Losses.total(values, micro, micro.rows))

    def scored(self, output: Any, micro: Microbatch, batch: Batch) -> list[Scored]:
        """Returns the sums of a batch's microbatches, with its last one. Collective."""
        self._waiting.append(output)
        if micro is not batch.microbatches[-1]:
            return []
        outputs, self._waiting = self._waiting, []
        parts = self._parts(batch, outputs, None)
        several = zip(parts, batch.microbatches, strict=True)
        return [part.scored for part, one in several if one.rows]

    def _dry(self, output: Any, micro: Microbatch) -> Part:
        """Computes the loss of one of several microbatches alone, to find which weights it depends on."""
        leaves, nesting = tree_flatten(output)
        floats = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
        own = [
            leaf.detach().requires_grad_() if is_float else leaf
            for leaf, is_float in zip(leaves, floats, strict=True)
        ]
        given = tree_unflatten(own, nesting)
        with torch.enable_grad():
            values, _ = values_of(self._task, given, micro.targets, micro.size, micro.weights)
        wanted = [leaf for leaf, is_float in zip(own, floats, strict=True) if is_float]
        found = iter(torch.autograd.grad(values.sum(), wanted, allow_unused=True))
        gradients = tuple(next(found) if is_float else None for is_float in floats)
        return Part(gradients, Scored(values.detach().sum().float(), float(micro.rows), {}))

    def _parts(self, batch: Batch, outputs: Sequence[Any], scale: float | None) -> list[Part]:
        """Computes the loss of the whole batch; without `scale` no gradients."""
        micros = batch.microbatches
        self._slices.begin(batch.samples)
        with torch.set_grad_enabled(scale is not None):
            given, own = self._whole(micros, outputs, "the model's output", training=scale is not None)
            self._check_targets(micros)
            targets, _ = self._whole(micros, [micro.targets for micro in micros], "the target")
            weights = [self._weights(micro) for micro in micros]
            whole_weights = None if weights[0] is None else self._whole(micros, weights, "counts()")[0]
            values, named = values_of(self._task, given, targets, batch.samples, whole_weights)
            gradients: Sequence[Tensor | None] = [None] * len(own)
            if scale is not None:
                gradients = self._gradients(values, own, batch, whole_weights, scale)
        by_micro = _cut(gradients, own, micros, first=self._slices.has_first)
        sums = self._sums(values, batch)
        by_name = {name: self._sums(one, batch) for name, one in named.items()}
        found = []
        for number, (micro, cut) in enumerate(zip(micros, by_micro, strict=True)):
            weights = micro.weights
            count = weights[: micro.rows].sum() if isinstance(weights, Tensor) else float(micro.rows)
            of_names = {name: several[number] for name, several in by_name.items()}
            found.append(Part(cut, Scored(sums[number], count, of_names)))
        return found

    def _sums(self, values: Tensor, batch: Batch) -> list[Tensor]:
        """Returns, by microbatch, the sum of the losses of its samples, from `values` of the global batch."""
        micros = batch.microbatches
        values = values.detach()
        mine = self._slices.mine(values.reshape(batch.samples, -1) if micros[0].weights is None else values)
        found = []
        for part, micro in zip(mine.split([micro.rows for micro in micros]), micros, strict=True):
            weights = micro.weights[: micro.rows] if isinstance(micro.weights, Tensor) else None
            found.append(Losses.total(part, micro._replace(weights=weights, padding=0), micro.rows))
        return found

    def _whole(
        self, micros: Sequence[Microbatch], several: Sequence[Any], what: str, *, training: bool = False
    ) -> tuple[Any, list[Tensor | None]]:
        """Returns the global batch's tensors, and by leaf what of them is this process's; None: it has no gradient.

        Args:
            several: by microbatch, tensors that nest alike.
        """
        flat = [tree_flatten(one) for one in several]
        given: list[Any] = []
        own: list[Tensor | None] = []
        for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
            mine = leaves[0]
            if isinstance(mine, Tensor):
                mine = _joined(leaves, micros, f"{type(self._task).__name__}: {what}").detach()
                mine.requires_grad_(training and mine.is_floating_point())
            rows = isinstance(mine, Tensor) and mine.dim() > 0
            given.append(self._slices.gathered(mine) if rows else mine)
            own.append(mine if isinstance(mine, Tensor) and mine.requires_grad else None)
        return tree_unflatten(given, flat[0][1]), own

    def _weights(self, micro: Microbatch) -> Tensor | None:
        if isinstance(micro.weights, Mapping):
            raise TaskError(
                f"{type(self._task).__name__}: a loss of the whole batch has one counts() for all its values, and "
                f"no dictionary{at(self._task, 'counts')}"
            )
        return micro.weights

    def _check_targets(self, micros: Sequence[Microbatch]) -> None:
        """Checks that targets are tensors, which can be gathered."""
        for leaf in tree_leaves([micro.targets for micro in micros]):
            if not isinstance(leaf, Tensor):
                raise TaskError(
                    f"{type(self._task).__name__}: whole_batch_loss needs the target as tensors with a row for each "
                    f"sample, and there is {type(leaf).__name__} in it"
                )

    def _gradients(
        self, values: Tensor, own: Sequence[Tensor | None], batch: Batch, weights: Tensor | None, scale: float
    ) -> list[Tensor | None]:
        """Computes the gradient of the global batch's mean loss x `scale` with respect to this process's leaves."""
        start = _start(values, batch, weights, scale)
        leaves = [leaf for leaf in own if leaf is not None]
        if not values.requires_grad:
            raise TaskError(f"{type(self._task).__name__}.loss() does not depend on the model's output")
        found = iter(torch.autograd.grad(values, leaves, start, allow_unused=True))
        return [None if leaf is None else next(found) for leaf in own]


AnyLosses = Losses | WholeBatchLosses


def _start(values: Tensor, batch: Batch, weights: Tensor | None, scale: float) -> Tensor:
    """Returns the gradient of the global batch's mean loss x `scale` with respect to the global batch's `values`."""
    if weights is not None:
        return (weights * (scale / batch.count)).to(values.dtype)
    return torch.full_like(values, scale / (float(batch.count) * (values.numel() // batch.samples)))


def _joined(leaves: Sequence[Tensor], micros: Sequence[Microbatch], what: str) -> Tensor:
    """Returns the samples' rows of a slice's microbatches, one after the other; a scalar as it is."""
    for leaf, micro in zip(leaves, micros, strict=True):
        if leaf.dim() and len(leaf) != micro.size:
            raise TaskError(
                f"{what} has a tensor {list(leaf.shape)} for {micro.size} rows: a loss of the whole batch takes "
                "tensors with a row for each sample, and scalars without a dimension: expand what all samples share "
                "to a row for each"
            )
    if not leaves[0].dim():
        return leaves[0]
    return torch.cat([leaf[: micro.rows] for leaf, micro in zip(leaves, micros, strict=True)])


def _cut(
    gradients: Sequence[Tensor | None],
    own: Sequence[Tensor | None],
    micros: Sequence[Microbatch],
    *,
    first: bool,
) -> list[tuple[Tensor | None, ...]]:
    """Cuts gradients into the microbatches' rows; rows of padding get zeros.

    A scalar's gradient, which every process has whole, goes to the microbatch of the global batch's first row.
    """
    found: list[list[Tensor | None]] = [[] for _ in micros]
    owner = next((number for number, micro in enumerate(micros) if micro.rows), None) if first else None
    for gradient, leaf in zip(gradients, own, strict=True):
        pieces: Sequence[Tensor | None] = [None] * len(micros)
        if gradient is not None and leaf is not None and not leaf.dim():
            pieces = [gradient if owner == number else gradient * 0 for number in range(len(micros))]
        elif gradient is not None:
            rows = gradient.split([micro.rows for micro in micros])
            several = zip(rows, micros, strict=True)
            pieces = [
                torch.cat([one, one.new_zeros(micro.padding, *one.shape[1:])]) for one, micro in several
            ]
        for into, piece in zip(found, pieces, strict=True):
            into.append(piece)
    return [tuple(one) for one in found]
