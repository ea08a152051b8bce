"""Forward passes without gradients: evaluation, and a step's first pass where the loss needs all outputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from grappe.data.batch import Batch, Microbatch
from grappe.data.rand_like import entering
from grappe.engines.base import EngineSetup
from grappe.parallel.batchnorm import buffers_agreed, buffers_kept, ignoring_padding
from grappe.parallel.compile import replaying
from grappe.parallel.shard import reshard
from grappe.profiling import memory
from grappe.step.precision import autocast
from grappe.step.scores import Scorer, Scores
from grappe.step.whole_batch_loss import AnyLosses, WholeBatchLosses


@torch.no_grad()
def evaluate(
    model: nn.Module,
    setup: EngineSetup,
    batches: Iterator[Batch],
    samples: int,
    forward: Callable[[Any], Any] | None = None,
) -> Scores:
    """Computes the scores over all data slices; the model is in training mode again afterwards. Collective.

    Args:
        forward: the function that is called with the inputs, if it is not the model itself.
    """
    plan, world = setup.plan, setup.world
    scorer = Scorer(setup.task, plan, world)
    forward = replaying(forward or functools.partial(setup.task.forward, model), plan, keeps=True)
    model.eval()
    try:
        heap = contextlib.nullcontext() if plan.saves_memory else memory.keep_freed_memory()
        with heap, buffers_agreed(model, world.data_group), autocast(plan.precision, world.device):
            for batch in batches:
                for micro in batch.microbatches:
                    scorer.add(forward(entering(micro)), micro, batch)
    finally:
        model.train()
    scores = scorer.scores(samples)
    reshard(model)
    return scores


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
    *,
    scale: float = 1.0,
    precision: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
    """Runs forward of all microbatches without gradients, if the loss needs their outputs. Collective.

    No buffer and no generator changes.

    Args:
        forward: called with each microbatch's number and the microbatch, in the order of the pass that follows, so that
            dropout draws the same.
        scale: factor of the output gradient, as in the pass that follows.
        precision: context of the loss.
    """
    if not isinstance(losses, WholeBatchLosses) or not losses.look_ahead_needed(batch):
        return
    outputs = []
    with nothing_changed(model, setup.world.device):
        for number, micro in enumerate(batch.microbatches):
            with contextlib.nullcontext() if micro.rows else ignoring_padding(model):
                outputs.append(forward(number, micro))
        with precision or contextlib.nullcontext():
            losses.look_ahead(batch, outputs, scale)
    reshard(model)
