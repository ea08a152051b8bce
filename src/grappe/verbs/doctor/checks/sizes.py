"""Check of sizes that are slow on tensor cores: matrices and batches that are not multiples of 8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grappe import tasks
from grappe.errors import GrappeError
from grappe.verbs.doctor.checks import Finding, Machine, error, note
from grappe.words import and_more

STEP = 8
SHOWN = 4


def check(machine: Machine) -> Iterator[Finding]:
    """Builds the task's model without memory, and checks its layers; a task that cannot be built is an error."""
    if machine.task is None or machine.process.rank:
        return
    import torch

    try:
        task = tasks.make(tasks.find(machine.task), machine.fields)
        with torch.device("meta"):
            model = task.model()
    except GrappeError as mistake:
        yield error(str(mistake), why="training would end at once")
        return
    except Exception as mistake:
        yield note(f"the task's model could not be built without memory ({type(mistake).__name__}): sizes not checked")
        return
    if machine.plan.precision != "fp32":
        slices = machine.plan.data_parallel * machine.plan.microbatches
        yield from of_sizes(model, -(-task.batch_size // slices))


def of_sizes(model: Any, rows: int) -> Iterator[Finding]:
    """Returns findings for layers that get `rows` samples at once. The course DLO-JZ recommends multiples of 8."""
    from torch import nn

    odd = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            sizes = (layer.in_features, layer.out_features)
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            sizes = (layer.out_channels,)  # input channels of images are few, and padded
        else:
            continue
        odd += [f"{name} ({size})" for size in sizes if size % STEP]
    if odd:
        yield note(f"sizes that are no multiple of {STEP}: {and_more(odd, SHOWN)}",
                   why="tensor cores work on multiples of 8", do="pad them, where the task allows it")  # fmt: skip
    if rows % STEP:
        yield note(
            f"each process sees {rows} samples at once, no multiple of {STEP}",
            why="tensor cores work on multiples of 8",
            do="choose batch_size so that each slice is one",
        )
