"""Evaluation of a whole model, or of one that its hooks gather: one pass without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from grappe.data.batch import Batch
from grappe.engines.base import EngineSetup
from grappe.parallel.batchnorm import buffers_agreed
from grappe.parallel.shard import reshard
from grappe.profiling import memory
from grappe.step.precision import autocast
from grappe.step.scores import Scorer, Scores


@torch.no_grad()
def evaluate(model: nn.Module, setup: EngineSetup, batches: Iterator[Batch], samples: int) -> Scores:
    """Computes the scores over all data slices; the model is in training mode again afterwards. Collective."""
    plan, world = setup.plan, setup.world
    scorer = Scorer(setup.task, world)
    model.eval()
    try:
        reused = contextlib.nullcontext() if plan.saves_memory else memory.reused()
        with reused, buffers_agreed(model, world.data_group), autocast(plan.precision, world.device):
            for batch in batches:
                for micro in batch.microbatches:
                    scorer.add(model(micro.inputs), micro)
    finally:
        model.train()
    scores = scorer.scores(samples)
    reshard(model)
    return scores
