"""--smoke: one step, evaluation, save and resume, under the real plan."""

from __future__ import annotations

import dataclasses

from grappe.errors import UsageError
from grappe.launch.folders import scratch
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.verbs.train import run_training


def smoke(request: Request) -> str:
    """Takes one step and saves, then resumes for a second step, in a temporary folder.

    Returns:
        A line that lists the successful parts.

    Raises:
        GrappeError: a part failed.
        UsageError: the request begins behind step 0.
    """
    if request.with_optimizer or request.epochs_done:
        raise UsageError("--smoke takes steps 1 and 2: leave --with-optimizer and --epochs-done out")
    with scratch("smoke") as folder:
        first = dataclasses.replace(request, run=folder / "run", options=Options(steps=1))
        run_training(first)
        second = run_training(dataclasses.replace(first, weights=None, options=Options(steps=2)))
    plan = str(request.plan) or "one process"
    return f"smoke: step, evaluation, save and resume work under {plan} ({second.step} steps)"
