"""First pass of a step: forward of all microbatches, for a loss of the whole batch, which needs all outputs first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from grappe.data.batch import Batch, Microbatch
from grappe.engines.base import EngineSetup
from grappe.parallel.batchnorm import buffers_kept, ignoring_padding
from grappe.parallel.shard import reshard
from grappe.step.whole_batch_loss import AnyLosses, WholeBatchLosses


@contextlib.contextmanager
def nothing_changed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which forwards change no buffer of the model and no random generator."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), buffers_kept(model):
        yield


@torch.no_grad()
def first_pass(
    losses: AnyLosses,
    setup: EngineSetup,
    model: nn.Module,
    batch: Batch,
    forward: Callable[[int, Microbatch], Any],
    scale: float = 1.0,
) -> None:
    """Runs forward of all microbatches without gradients, if the loss needs their outputs. Collective.

    No buffer and no generator changes.

    Args:
        forward: called with each microbatch's number and the microbatch, in the order of the pass that follows, so that
            dropout draws the same.
        scale: factor of the output gradient, as in the pass that follows.
    """
    if not isinstance(losses, WholeBatchLosses) or not losses.look_ahead_needed(batch):
        return
    outputs = []
    with nothing_changed(model, setup.world.device):
        for number, micro in enumerate(batch.microbatches):
            with contextlib.nullcontext() if micro.rows else ignoring_padding(model):
                outputs.append(forward(number, micro))
        losses.look_ahead(batch, outputs, scale)
    reshard(model)
