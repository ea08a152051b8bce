"""FLOPs of a model, counted by operation, and the device's measured FLOP/s on a large matrix product."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from grappe.data.arrays import in_memory
from grappe.data.batch import stored_in
from grappe.data.collate import collated
from grappe.parallel.materialise import on_meta
from grappe.plan import Plan
from grappe.private_api.torch import tree_map
from grappe.step.loss import loss_of
from grappe.step.precision import LOWER, set_gpu_arithmetic
from grappe.task import Task

ROWS = 2
SIDE = {"cpu": 1024, "cuda": 8192}  # of the matrices whose product a device is measured by
REPEATS = {"cpu": 5, "cuda": 50}
"""Products: a GPU that was idle takes a tenth of a second to its full clock, and to its limit of power."""


def per_sample(task: Task, dataset: Any) -> float:
    """Counts floating-point operations of one sample's forward and backward: a multiplication and an addition are 2.

    Matrix products, convolutions and attention count; additions, activations and normalisations do not, as is
    usual (torch.utils.flop_counter). Nothing is computed: the model is on the meta device, unless it reads values.
    """
    arrays = in_memory(dataset)
    if arrays is not None:
        inputs, targets = arrays.gather(np.arange(ROWS) % len(dataset), torch.device("cpu"))
    else:
        inputs, targets = collated(task, [dataset[index % len(dataset)] for index in range(ROWS)])
    try:
        meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, (inputs, targets))
        return _counted(task, on_meta(task), *meta) / ROWS
    except (RuntimeError, NotImplementedError):  # it reads a tensor's values
        return _counted(task, task.model(), inputs, targets) / ROWS


def _counted(task: Task, model: Any, inputs: Any, targets: Any) -> int:
    model.train()
    with FlopCounterMode(display=False) as counter:
        loss_of(task, task.forward(model, inputs), targets).values.sum().backward()
    return counter.get_total_flops()


def reachable(device: torch.device, plan: Plan) -> float:
    """Measures FLOP/s of a large matrix product on `device`, in the plan's precision.

    The result is what this process's threads can reach on this machine now; a data
    sheet's peak is higher.
    """
    set_gpu_arithmetic(plan.precision)
    side = SIDE[device.type]
    kind = LOWER.get(plan.precision, stored_in(plan))
    # Random numbers: with equal ones a GPU takes less power, and runs faster than with a model's.
    random = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, generator=random, device=device).to(kind) for _ in range(2))
    taken = sorted(_seconds(a, b) for _ in range(REPEATS[device.type]))
    # A CPU shares its cores with others, which only slow it down; a GPU's best is before its power limit.
    return 2 * side**3 / taken[len(taken) // 2 if a.is_cuda else 0]


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.is_cuda:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        a @ b
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3
    start = time.perf_counter()
    a @ b
    return time.perf_counter() - start
