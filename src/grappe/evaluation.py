"""Evaluation of a model that is whole in itself, or made whole by its own hooks: one pass without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from grappe import memory
from grappe.data.batch import Batch
from grappe.prepare.batchnorm import buffers_agreed
from grappe.scores import Scorer, Scores
from grappe.task import Task
from grappe.world import World


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    world: World,
    batches: Iterator[Batch],
    samples: int,
    precision: contextlib.AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008
    *,
    scarce: bool = False,
) -> Scores:
    """The scores over all data slices; the model is in training mode again afterwards. Collective.

    Args:
        scarce: whether memory is worth more than time.
    """
    scorer = Scorer(task, world)
    model.eval()
    try:
        reused = contextlib.nullcontext() if scarce else memory.reused()
        with reused, buffers_agreed(model, world.data_group), precision:
            for batch in batches:
                for micro in batch.microbatches:
                    scorer.add(model(micro.inputs), micro)
    finally:
        model.train()
    return scorer.scores(samples)
