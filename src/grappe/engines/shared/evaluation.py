"""Evaluation of a whole model, or of one that its hooks gather: one pass without gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from grappe.data.batch import Batch
from grappe.data.rand_like import entering
from grappe.engines.base import EngineSetup
from grappe.parallel.batchnorm import buffers_agreed
from grappe.parallel.compile import replaying
from grappe.parallel.shard import reshard
from grappe.profiling import memory
from grappe.step.precision import autocast
from grappe.step.scores import Scorer, Scores


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
        forward: what is called with the inputs, if that is not the model itself.
    """
    plan, world = setup.plan, setup.world
    scorer = Scorer(setup.task, plan, world)
    forward = replaying(forward or functools.partial(setup.task.forward, model), plan, keeps=True)
    model.eval()
    try:
        reused = contextlib.nullcontext() if plan.saves_memory else memory.keep_freed_memory()
        with reused, buffers_agreed(model, world.data_group), autocast(plan.precision, world.device):
            for batch in batches:
                for micro in batch.microbatches:
                    scorer.add(forward(entering(micro)), micro, batch)
    finally:
        model.train()
    scores = scorer.scores(samples)
    reshard(model)
    return scores
