"""Update: records the operators of gradient clipping and an optimizer's step on a process's parts of the parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from grappe.foresight.ledger import Ledger
from grappe.foresight.recording import Recorder, Recording
from grappe.foresight.trace import tensors_of
from grappe.plan import Plan
from grappe.step.clip import clipping, gradient_norm
from grappe.step.precision import LossScale
from grappe.step.task_contract import optimizer_of
from grappe.task import Task


def update_recording(
    task: Task, mode: Any, named: Sequence[tuple[str, tuple[int, ...], torch.dtype]], *, foreach: bool = False
) -> Recording:
    """Clips and steps the task's optimizer on fake parameters of these names, shapes and types.

    Returns the second step.
    """
    if not named:
        return Recording(operators=(), given=())
    with mode:
        made = [(name, nn.Parameter(torch.empty(shape, dtype=kind))) for name, shape, kind in named]
        optimizer = optimizer_of(task, made)
        for group in optimizer.param_groups:
            if foreach and group.get("foreach", False) is None:
                group["foreach"] = True
        for _, one in made:
            one.grad = torch.empty_like(one)
        optimizer.step()  # makes the state
        state = [
            value
            for _, one in made
            for value in (one, one.grad, *tensors_of(dict(optimizer.state.get(one, {}))))
        ]
        recorder = Recorder([one for one in state if one is not None])
        parameters = [one for _, one in made]
        clip = clipping(task, Plan(), LossScale("fp32"), parameters, lambda: gradient_norm(parameters))
        with Ledger([], recorder=recorder):
            if clip is not None:
                with torch.no_grad():
                    clip()
            optimizer.step()
        return dataclasses.replace(recorder.recording(), positive=True)
