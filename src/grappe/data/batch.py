"""Defines a batch: the samples of one optimizer step for this process, in microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from torch import Tensor

    LossWeights = Tensor | Mapping[str, Tensor] | None


# Tuples, since several are made at each step: a frozen dataclass of six fields takes 2 microseconds, a tuple 0.4.


class SampleIds(NamedTuple):
    """The samples of a microbatch, rows of padding included: what their random numbers depend on."""

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

    @property
    def size(self) -> int:
        """B, the rows with those of padding."""
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
