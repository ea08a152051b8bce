"""Defines a batch, the samples of one optimizer step for this process, in microbatches, and the weights of its losses.

A task counts the values of its loss together, or separately for each of several losses: with C_k the counts of
loss k over the global batch of N samples, the step's loss is the sum over k of (sum of counts x values) / C_k. The
weights of a training batch are then the counts times N / C_k, so that everything else divides by N.
An exact plan cuts each global batch into V fixed pieces over W data slices, V / W of them in each.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grappe.data.device_copy import sent
from grappe.data.sampling import cut
from grappe.errors import TaskError
from grappe.errors.user_line import at
from grappe.launch.world import gather_into
from grappe.plan import Plan
from grappe.task import Task

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


LossWeights = Tensor | Mapping[str, Tensor] | None

# Tuples, since several are made at each step: a frozen dataclass of six fields takes 2 microseconds, a tuple 0.4.


class BatchRows(NamedTuple):
    """The rows of a microbatch in the global batch."""

    first: int
    size: int
    """Padding included."""
    of: int
    """The number of rows of the global batch."""


class SampleIds(NamedTuple):
    """The samples of a microbatch, rows of padding included: their random numbers depend on these."""

    seed: int
    epoch: int
    """-1 in evaluation, so that every evaluation draws the same."""
    ids: np.ndarray
    """int64 (B,)."""


class Microbatch(NamedTuple):
    """Samples that go through the model together."""

    inputs: Any
    """Tensors [B, ...] on the device, nested as the dataset nests them."""
    targets: Any
    rows: int
    """The number of rows that are samples, the first of the B rows; the others are padding rows and count 0."""
    weights: LossWeights
    """The weight of each value of the loss; by name, of each of several losses; None: every row counts the same."""
    padding: int = 0
    """The number of padding rows. B is not read from a tensor: a batch of graphs has many nodes."""
    sample_ids: SampleIds | None = None
    """The samples that `grappe.rand_like` draws for."""
    place: BatchRows | None = None
    """Rows in the global batch, where a model's random numbers are drawn for the whole batch."""

    @property
    def size(self) -> int:
        """B, the rows including padding."""
        return self.rows + self.padding


class Batch(NamedTuple):
    """The samples of one optimizer step for this process."""

    epoch: int
    step: int
    """The number of steps before this one, since the training began."""
    microbatches: tuple[Microbatch, ...]
    samples: int
    """Samples in the global batch."""
    count: float | Tensor
    """The divisor of the global sum of losses, known before the first backward."""
    ids: np.ndarray
    """The sample ids of this process's slice, int64."""


class InModel:
    """The rows in this process's model, whose random numbers are drawn.

    Not per thread, since backward, which runs forwards again, has threads of its own on a GPU.
    """

    samples: SampleIds | None = None
    """`grappe.rand_like` draws for these; None: from torch's generator."""
    place: BatchRows | None = None
    """`whole_batch_draws` draws for these."""


def entering(micro: Microbatch) -> Any:
    """Returns the inputs of a microbatch whose forward, loss and backward come next: its samples' numbers are drawn."""
    InModel.samples, InModel.place = micro.sample_ids, micro.place
    return micro.inputs


@contextlib.contextmanager
def inside(samples: SampleIds | None) -> Iterator[None]:
    """Context in which `grappe.rand_like` draws for `samples`; None: from torch's generator."""
    before, InModel.samples = InModel.samples, samples
    try:
        yield
    finally:
        InModel.samples = before


def with_rows(rows: slice) -> contextlib.AbstractContextManager[None]:
    """Context of a call with some rows of the microbatch alone."""
    samples = InModel.samples
    return inside(None if samples is None else samples._replace(ids=samples.ids[rows]))


def counts_of(task: Task, targets: Any) -> LossWeights:
    """Returns the weight of each value of the loss; of several losses with counts of their own, by their names.

    Raises:
        TaskError: it is no tensor, and no dictionary of tensors.
    """
    counts: Any = task.counts(targets)
    if counts is None or isinstance(counts, Tensor):
        return counts
    wrong: Any = counts
    if isinstance(counts, Mapping) and counts:
        wrong = next((count for count in counts.values() if not isinstance(count, Tensor)), None)
        if wrong is None and None not in counts.values():
            return dict(counts)
    raise TaskError(
        f"{type(task).__name__}.counts() returned {type(wrong).__name__}: return a tensor in the shape of the loss, 0 "
        "where a value counts nothing; for several losses a dictionary of such tensors by their names; or None"
        + at(task, "counts")
    )


def stored_in(plan: Plan) -> torch.dtype:
    """Returns the type of a plan's parameters, gradients, losses, their weights and their sums."""
    return torch.float64 if plan.precision == "fp64" else torch.float32


def divided(
    micros: tuple[Microbatch, ...], samples: int, exact: ExactPieces | None, group: Any
) -> tuple[float | Tensor, tuple[Microbatch, ...]]:
    """Returns the divisor of the global batch's sum of losses, and the microbatches with their final weights.

    Collective over `group` where there are weights.

    Args:
        samples: N, of the global batch.
        exact: the plan's pieces, whose counts are summed in their order, so that the sum has the same bits.
        group: of the data slices; None: there is one.
    """
    several = [micro.weights for micro in micros if micro.weights is not None]
    if not several:
        return float(samples), micros
    sums = torch.stack(
        [
            torch.stack([each.sum() for each in weights.values()]) if isinstance(weights, Mapping) else weights.sum()
            for weights in several
        ]
    )
    total = _total(sums, exact, group)
    if not isinstance(several[0], Mapping):
        return torch.where(total == 0, 1.0, total), micros  # a batch in which nothing counts learns nothing
    factors = dict(zip(several[0], torch.where(total > 0, samples / total, 0.0).unbind(), strict=True))
    return float(samples), tuple(micro._replace(weights=_times(micro.weights, factors)) for micro in micros)


def _total(sums: Tensor, exact: ExactPieces | None, group: Any) -> Tensor:
    """Sums each microbatch's part, over all data slices; verify's tests plant a fault here."""
    if exact is not None and group is not None:
        return exact.gathered(sums, group).sum(0)
    total = sums.sum(0)
    if group is not None:
        torch.distributed.all_reduce(total, group=group)
    return total


def _times(weights: LossWeights, factors: Mapping[str, Tensor]) -> LossWeights:
    assert isinstance(weights, Mapping), "counts() gives the same kind for each microbatch"
    return {name: each * factors[name] for name, each in weights.items()}


def flat(several: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Tensor:
    """Returns the values, or the weights, of several losses one after the other: [values of all]."""
    return torch.cat([several[name].flatten() for name in names or several])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactPieces:
    """The distribution of a global batch's pieces over data slices."""

    pieces: int
    slices: int
    interleaved: bool
    """Whether a slice has every `slices`-th piece instead of consecutive pieces."""

    @classmethod
    def of(cls, plan: Plan) -> ExactPieces:
        """Returns the pieces of an exact plan."""
        # With sharding, pieces that are reduced together must be neighbours in the summation tree.
        return cls(pieces=plan.exact, slices=plan.data_parallel, interleaved=plan.shard > 1)

    def places(self, data_rank: int) -> range:
        """Returns the numbers of a data slice's pieces."""
        if self.interleaved:
            return range(data_rank, self.pieces, self.slices)
        share = self.pieces // self.slices
        return range(data_rank * share, (data_rank + 1) * share)

    def order(self) -> list[int]:
        """Returns each piece's position in the concatenation of slice 0's pieces, slice 1's pieces, and so on."""
        there = [piece for rank in range(self.slices) for piece in self.places(rank)]
        return sorted(range(self.pieces), key=there.__getitem__)

    def spans(self, samples: int, data_rank: int) -> list[tuple[int, int]]:
        """Returns the begin and the end of a slice's pieces in a global batch of `samples` rows."""
        return [cut(samples, self.pieces, piece) for piece in self.places(data_rank)]

    def gathered(self, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        """Gathers all slices' rows [V, ...] in the order of pieces, from this slice's [V / W, ...]. Collective."""
        if group is None:
            return tensor
        rows = tensor.new_empty(self.pieces, *tensor.shape[1:])
        gather_into(rows, tensor, group)
        return self.in_order(rows)

    def in_order(self, rows: Tensor) -> Tensor:
        """Returns rows [V, ...], slice 0's pieces first, in the order of pieces."""
        return rows.index_select(0, sent(torch.tensor(self.order()), rows.device))


def rows_of_slices(plan: Plan, samples: int) -> list[np.ndarray]:
    """Returns, for each data slice, the rows of a global batch of `samples` rows that it has: int64 arrays."""
    exact = ExactPieces.of(plan) if plan.exact else None
    indices = []
    for rank in range(plan.data_parallel):
        spans = [cut(samples, plan.data_parallel, rank)] if exact is None else exact.spans(samples, rank)
        indices.append(np.concatenate([np.arange(begin, end) for begin, end in spans]))
    return indices
