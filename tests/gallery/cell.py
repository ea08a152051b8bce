"""Trains a task of the gallery for a few steps, and leaves out of its weights what cannot be compared."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grappe import finder
from grappe.errors import GrappeError
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from tests.parity import cell
from tests.processes import Pool


def train(
    process: ProcessRank, rendezvous_folder: Path, file: str, plan: str, steps: int, folder: Path
) -> dict[str, Any]:
    """As tests.parity.cell.train, of the task in `file`."""
    return cell.train(process, rendezvous_folder, finder.find(file)(), plan, steps, folder)


def seen(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the bias of attention's keys: its gradient is rounding alone, and of that Adam makes whole steps."""
    kept = {key: one.detach().clone() for key, one in weights.items() if "key.bias" not in key}
    for key, one in kept.items():
        if key.endswith("in_proj_bias"):
            one.view(3, -1)[1] = 0  # of queries, keys and values
    return kept


def work(process: ProcessRank, rendezvous_folder: Path, function: str, request: Any) -> Any:
    """Runs a function of verify in a process; returns a message for the user as it is."""
    module, _, name = function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(request, process, rendezvous_folder)
    except GrappeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return error


def runner(pool: Pool) -> Callable[[str, Any, Plan], Any]:
    """Starts processes for verify: a pool's, which have their imports behind them."""

    def run(function: str, request: Any, plan: Plan) -> Any:
        answers = pool.run(f"{__name__}:work", plan.processes, function, request)
        for one in answers:
            if isinstance(one, GrappeError):
                raise one
        return answers[0]

    return run
