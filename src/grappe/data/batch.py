"""Batch: one optimizer step's worth of samples for this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


# Tuples, since several are made at each step: a frozen dataclass of six fields takes 2 microseconds, a tuple 0.4.


class Microbatch(NamedTuple):
    """What goes through the model at once."""

    inputs: Any
    """Tensors [B, ...] on the device, nested as the dataset nests them."""
    targets: Any
    rows: int
    """How many of the B rows are samples, the first ones; the rest is filled in, and counts 0."""
    weights: Tensor | None
    """What each value of the loss counts; None: every row the same."""


class Batch(NamedTuple):
    """One optimizer step's worth for this process."""

    epoch: int
    step: int
    """Steps before this one since the training began."""
    microbatches: tuple[Microbatch, ...]
    samples: int
    """Samples in the global batch."""
    count: float | Tensor
    """What the global sum of losses is divided by, known before the first backward."""
    ids: np.ndarray
    """The sample ids of this process's slice, int64."""
