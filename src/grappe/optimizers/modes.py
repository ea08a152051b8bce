"""Switches optimizers that evaluate and save other weights than they train: schedule-free ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from grappe.step.clip import local_part


def has_modes(optimizer: Optimizer) -> bool:
    """Says whether the optimizer has train() and eval(), as schedule-free ones do."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def begin_training(optimizer: Any) -> None:
    """Puts an optimizer that has modes into its training mode; some refuse to step without."""
    if has_modes(optimizer):
        optimizer.train()


@contextlib.contextmanager
@torch.no_grad()
def evaluated_weights(optimizer: Any) -> Iterator[None]:
    """Inside, parameters have the values that are to be evaluated and saved; afterwards their own, to the bit.

    train() may compute the trained values from the evaluated ones, with rounding: then when a training is evaluated or
    saved would change what it learns. So they are kept, which takes the parameters' memory once more.
    """
    if not has_modes(optimizer):
        yield
        return
    parameters = [local_part(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
