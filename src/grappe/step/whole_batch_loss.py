"""WholeBatchLosses: the loss of a task that compares samples, over the global batch, under any plan.

The loss is computed of outputs and targets whose rows the processes share (`grappe.rows`), and its gradient with
respect to each process's own rows: backward begins with these. Several microbatches need a first pass without
gradients, which gives their outputs, and a second one with these gradients (GradCache: Gao, Zhang, Han and Callan,
"Scaling deep contrastive learning batch size under memory limited setup", 2021, arXiv 2101.06983).

Shapes: a global batch of B rows, b of them in this process's slice, its microbatches one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grappe.data.batch import Batch, Microbatch, rows_of_slices, stored_in
from grappe.data.device_copy import sent
from grappe.data.whole_batch_draws import whole_batch_draws
from grappe.errors import TaskError
from grappe.errors.user_line import at
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import tree_flatten, tree_leaves, tree_unflatten
from grappe.profiling.phases import BACKWARD
from grappe.rows.context import RowsContext
from grappe.rows.layout import Placement
from grappe.rows.plans import activate
from grappe.rows.tensor import Rows, from_local, full, own_of
from grappe.step.loss import Loss, Losses, ScoredLoss, total_of, values_of
from grappe.step.observers import Observers
from grappe.task import Task, overrides


class LossPart(NamedTuple):
    """The part of the whole batch's loss that belongs to a microbatch."""

    gradients: tuple[Tensor | None, ...]
    """Gradients of the microbatch's output by leaf, padding included; None if the loss does not depend on a leaf."""
    scored: ScoredLoss
    """The sums of the losses of the microbatch's samples."""


class WholeBatchLosses:
    """Calls `task.loss` with the outputs and targets of the global batch. Collective over the data slices."""

    def __init__(self, task: Task, plan: Plan, world: World, observers: Observers | None = None) -> None:
        self._own_collate = overrides(task, "collate")
        self._task, self._observers = task, observers or Observers()
        self._slices, self._summed_in = SharedRows(plan, world), stored_in(plan)
        self._whole = Losses(task, observers, self._summed_in)
        """For a batch that this process holds whole."""
        # Exact plans add up in the order of their pieces, on one process too.
        self._batch_is_local = world.size == 1 and not plan.exact
        self._checked = False
        self._ahead: list[tuple[Microbatch, LossPart]] = []
        """The parts of the microbatches that the first pass has seen, and the second one has not yet."""
        self._outputs: list[Any] = []
        """Outputs of an evaluation's batch whose other microbatches are not there yet."""

    def look_ahead_needed(self, batch: Batch) -> bool:
        """Returns whether a first pass must give all outputs; the same on every process.

        Also where a slice has no sample: some engines skip empty microbatches, and would not take part in gathering.
        """
        return len(batch.microbatches) > 1 or self._slices.layout(batch.samples).has_empty

    def look_ahead(self, batch: Batch, outputs: Sequence[Any], scale: float) -> None:
        """Takes the outputs of a step's microbatches, from the first pass. Collective."""
        parts = self._parts(batch, outputs, scale)
        self._ahead = list(zip(batch.microbatches, parts, strict=True))

    def __call__(self, output: object, micro: Microbatch, batch: Batch, scale: float = 1.0) -> Loss:
        """Computes the loss of a microbatch of `batch`: `values` is its output, flattened.

        Collective, but after `look_ahead`.

        Args:
            scale: factor of the output gradient: the loss scale, or a later divisor of the gradients.

        Raises:
            TaskError: the loss is a mean, or the output has neither rows nor scalars.
        """
        if self._batch_is_local and len(batch.microbatches) == 1:
            return self._direct(output, micro, batch, scale)
        part = next((part for ahead, part in self._ahead if ahead is micro), None)
        if part is None:
            assert len(batch.microbatches) == 1, "several microbatches need a first pass"
            [part] = self._parts(batch, [output], scale)
        self._ahead = [(ahead, kept) for ahead, kept in self._ahead if ahead is not micro]
        self._observers.after_loss(output, micro, part.scored.named)
        self._observers.phase(BACKWARD)
        return self._loss(output, part)

    def dry_run(self, output: object, micro: Microbatch, batch: Batch) -> Loss:
        """Computes the loss of a microbatch alone, to find which weights it depends on; no observer sees it."""
        leaves, nesting = tree_flatten(output)
        floats = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
        roots = [
            leaf.detach().requires_grad_() if is_float else leaf for leaf, is_float in zip(leaves, floats, strict=True)
        ]
        with torch.enable_grad():
            root_output = tree_unflatten(roots, nesting)
            values, _ = values_of(self._task, root_output, micro.targets, micro.size, micro.weights)
        inputs = [root for root, is_float in zip(roots, floats, strict=True) if is_float]
        gradients = iter(torch.autograd.grad(values.sum(), inputs, allow_unused=True))
        scored = ScoredLoss(values.detach().sum().to(self._summed_in), float(micro.rows), {})
        return self._loss(output, LossPart(tuple(next(gradients) if is_float else None for is_float in floats), scored))

    def _loss(self, output: object, part: LossPart) -> Loss:
        """Returns the loss whose backward starts from the output's leaves, by the part's gradients."""
        leaves, _ = tree_flatten(output)
        starts = [
            (leaf.reshape(-1).to(self._summed_in), gradient.reshape(-1).to(self._summed_in))
            for leaf, gradient in zip(leaves, part.gradients, strict=True)
            if gradient is not None and leaf.requires_grad
        ]
        if not starts:
            raise TaskError(f"{type(self._task).__name__}.loss() does not depend on the model's weights")
        values, gradients = zip(*starts, strict=True)
        return Loss(torch.cat(values), torch.cat(gradients), part.scored.total)

    def _direct(self, output: object, micro: Microbatch, batch: Batch, scale: float) -> Loss:
        """Computes the loss of a global batch that this process holds whole; an ordinary backward follows."""
        if not self._checked:  # checked here too, as any other plan would refuse it
            self._of_all([micro], [output], "the model's output")
            self._check_targets([micro])
            self._of_all([micro], [micro.targets], "the target")
            self._checked = True
        self._weights(micro)
        loss = self._whole(output, micro, batch, scale)
        if not loss.values.requires_grad:
            raise TaskError(f"{type(self._task).__name__}.loss() does not depend on the model's weights")
        return loss

    def scored(self, output: Any, micro: Microbatch, batch: Batch) -> list[ScoredLoss]:
        """Returns the sums of a batch's microbatches, with its last one. Collective."""
        self._outputs.append(output)
        if micro is not batch.microbatches[-1]:
            return []
        outputs, self._outputs = self._outputs, []
        parts = zip(self._parts(batch, outputs, None), batch.microbatches, strict=True)
        return [part.scored for part, micro in parts if micro.rows]

    def _parts(self, batch: Batch, outputs: Sequence[Any], scale: float | None) -> list[LossPart]:
        """Computes the loss of the whole batch, by microbatch of this process; without `scale` no gradients."""
        micros = batch.microbatches
        if self._own_collate:
            self._refuse_ragged(outputs, [micro.targets for micro in micros])
        self._slices.begin(batch.samples)
        # A tensor of all rows draws for them all as one process does.
        with torch.set_grad_enabled(scale is not None), whole_batch_draws(None), self._slices.shared():
            output, leaves = self._of_all(micros, outputs, "the model's output", training=scale is not None)
            self._check_targets(micros)
            targets, _ = self._of_all(micros, [micro.targets for micro in micros], "the target")
            weights = [self._weights(micro) for micro in micros]
            all_weights = None if weights[0] is None else self._of_all(micros, weights, "counts()")[0]
            values, named = values_of(self._task, output, targets, batch.samples, all_weights)
            gradients: Sequence[Tensor | None] = [None] * len(leaves)
            if scale is not None:
                if not values.requires_grad:
                    raise TaskError(f"{type(self._task).__name__}.loss() does not depend on the model's output")
                if all_weights is not None:
                    start = (all_weights * (scale / batch.count)).to(values.dtype)
                else:
                    start = torch.full_like(values, scale / (float(batch.count) * (values.numel() // batch.samples)))
                present = [leaf for leaf in leaves if leaf is not None]
                computed = iter(torch.autograd.grad(values, present, start, allow_unused=True))
                gradients = [None if leaf is None else self._own_gradient(next(computed)) for leaf in leaves]
            totals = self._totals(values, batch)
            named_totals = {name: self._totals(each, batch) for name, each in named.items()}
        by_micro = _by_microbatch(gradients, leaves, micros, first=self._slices.layout(batch.samples).has_first)
        parts = []
        for number, micro in enumerate(micros):
            count = micro.weights[: micro.rows].sum() if isinstance(micro.weights, Tensor) else float(micro.rows)
            names = {name: several[number] for name, several in named_totals.items()}
            parts.append(LossPart(by_micro[number], ScoredLoss(totals[number], count, names)))
        return parts

    def _refuse_ragged(self, *several: Sequence[Any]) -> None:
        """Raises TaskError where parts of the batch have tensors that differ in more than rows. Collective."""
        own = [
            [tuple(leaf.shape[1:]) for leaf in tree_leaves(each) if isinstance(leaf, Tensor)]
            for each in zip(*several, strict=True)
        ]
        everyone = [shapes for parts in self._slices.by_slice(own) for shapes in parts]
        odd = next((shapes for shapes in everyone if shapes != everyone[0]), None)
        if odd is not None:
            a, b = next((a, b) for a, b in zip(everyone[0], odd, strict=False) if a != b)
            raise TaskError(
                f"{type(self._task).__name__}: the loss compares samples of the whole batch, and a part of it has "
                f"tensors {list(a)} a sample, another {list(b)}: collate() pads each part to its own longest. Pad to "
                f"one length, or use domain=N,cut=batch for replicate=N, where collate() gets the whole batch"
                + at(self._task, "collate")
            )

    def _totals(self, values: Tensor, batch: Batch) -> list[Tensor]:
        """Returns, by microbatch, the sum of the losses of its samples, from `values` of the global batch."""
        micros = batch.microbatches
        values = values.detach()
        rows = self._slices.own_rows(values.reshape(batch.samples, -1) if micros[0].weights is None else values)
        totals = []
        for part, micro in zip(rows.split([micro.rows for micro in micros]), micros, strict=True):
            weights = micro.weights[: micro.rows] if isinstance(micro.weights, Tensor) else None
            totals.append(total_of(part, micro._replace(weights=weights, padding=0), self._summed_in))
        return totals

    def _of_all(
        self, micros: Sequence[Microbatch], nested: Sequence[Any], what: str, *, training: bool = False
    ) -> tuple[Any, list[Tensor | None]]:
        """Returns the global batch's tensors, from those of each microbatch; and by leaf one that has a gradient."""
        flattened = [tree_flatten(each) for each in nested]
        everyone: list[Any] = []
        for leaves in zip(*(leaves for leaves, _ in flattened), strict=True):
            leaf = leaves[0]
            if isinstance(leaf, Tensor):
                leaf = _joined(leaves, micros, f"{type(self._task).__name__}: {what}").detach()
                leaf = self._slices.of_all(leaf) if leaf.dim() else leaf
                leaf.requires_grad_(training and leaf.is_floating_point())
            everyone.append(leaf)
        trained = [leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in everyone]
        return tree_unflatten(everyone, flattened[0][1]), trained

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

    def _own_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """Returns this process's rows of a leaf's gradient; a scalar's whole."""
        if gradient is None:
            return None
        return self._slices.own_rows(gradient) if gradient.dim() else full(gradient)


AnyLosses = Losses | WholeBatchLosses


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


def _by_microbatch(
    gradients: Sequence[Tensor | None], own: Sequence[Tensor | None], micros: Sequence[Microbatch], *, first: bool
) -> list[tuple[Tensor | None, ...]]:
    """Cuts gradients into the microbatches' rows; rows of padding get zeros.

    A scalar's gradient, which every process has whole, goes to the microbatch of the global batch's first row.
    """
    by_micro: list[list[Tensor | None]] = [[] for _ in micros]
    owner = next((number for number, micro in enumerate(micros) if micro.rows), None) if first else None
    for gradient, leaf in zip(gradients, own, strict=True):
        pieces: Sequence[Tensor | None] = [None] * len(micros)
        if gradient is not None and leaf is not None and not leaf.dim():
            pieces = [gradient if owner == number else gradient * 0 for number in range(len(micros))]
        elif gradient is not None:
            rows = gradient.split([micro.rows for micro in micros])
            pieces = [
                torch.cat([part, part.new_zeros(micro.padding, *part.shape[1:])])
                for part, micro in zip(rows, micros, strict=True)
            ]
        for pieces_of_micro, piece in zip(by_micro, pieces, strict=True):
            pieces_of_micro.append(piece)
    return [tuple(pieces) for pieces in by_micro]


# ---- The rows of all data slices ---------------------------------------------------------------------------


class SliceLayout(NamedTuple):
    """The rows of a global batch of one size, by data slice."""

    placement: Placement
    """Slices one after the other."""
    order: Tensor | None
    """The row among the slices of each row of the global batch; None: slices are in the batch's order."""
    own: Tensor
    """The row in the global batch of each row of this slice."""
    has_first: bool
    """Whether the global batch's first row is this slice's."""
    has_empty: bool
    """Whether a slice has no row."""


class SharedRows:
    """Tensors with a row for each sample: each process has its slice's rows, which look like those of all slices."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self._world = plan, world
        self._context = RowsContext(rank=world.data_rank, size=world.data_size, group=world.data_group)
        # Foresight's tensors have no values.
        self._is_foreseen = world.data_group is not None and dist.get_backend(world.data_group) == "fake"
        self._layouts: dict[int, SliceLayout] = {}
        self._layout = self.layout(1)

    def begin(self, samples: int) -> None:
        """Begins with a global batch of `samples` rows."""
        self._layout = self.layout(samples)

    def layout(self, samples: int) -> SliceLayout:
        """Returns the layout of a global batch of `samples` rows."""
        if samples not in self._layouts:
            slices, device = rows_of_slices(self._plan, samples), self._world.device
            own, order = slices[self._world.data_rank], np.argsort(np.concatenate(slices))
            self._layouts[samples] = SliceLayout(
                Placement(0, tuple(map(len, slices))),
                sent(torch.from_numpy(order), device) if self._plan.exact else None,
                sent(torch.from_numpy(own), device),
                bool(len(own)) and int(own[0]) == 0,
                any(not len(rows) for rows in slices),
            )
        return self._layouts[samples]

    def shared(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the processes share the rows."""
        return contextlib.nullcontext() if self._world.data_group is None else activate(self._context)

    def own_rows(self, rows: Tensor) -> Tensor:
        """Returns this slice's rows [b, ...] of `rows` [B, ...]."""
        if type(rows) is Rows or self._layout.order is None:
            return own_of(rows, self._layout.placement)
        return rows.index_select(0, self._layout.own)

    def by_slice(self, own: Any) -> list[Any]:
        """Gathers a value of each slice. Collective."""
        return [own] if self._is_foreseen else self._world.gather_data(own)

    def of_all(self, own: Tensor) -> Tensor:
        """Returns [B, ...] of every slice's [b, ...]. An exact plan's are gathered: sums are then the same bits."""
        group, placement = self._world.data_group, self._layout.placement
        if group is None:
            return own
        if self._is_foreseen:
            return own.new_empty((placement.total, *own.shape[1:]))
        rows = from_local(own, placement)
        return rows if self._layout.order is None else full(rows).index_select(0, self._layout.order)
