"""GPUs: gives each of the trainings that run at a time GPUs of its own, as far as there are enough."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from grappe.launch.mps import DEVICES
from grappe.plan import Plan


def visible(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    if DEVICES in environment:
        return [name.strip() for name in environment[DEVICES].split(",") if name.strip()]
    return [str(index) for index in range(len(list(devices.glob("nvidia[0-9]*"))))]


def needed(plan: Plan) -> int:
    """The number of GPUs that a trial takes."""
    return 0 if plan.device == "cpu" else -(-plan.processes // plan.per_device)


def variables(plan: Plan, place: int, gpus: Sequence[str], most: int) -> dict[str, str]:
    """The variables of a trial's processes.

    Args:
        place: of the trial, among those that run at a time, from 0.
        most: GPUs that any of the study's trials takes; each place has so many.
    """
    own = needed(plan)
    groups = len(gpus) // max(own, most, 1)
    if not own or groups < 2:
        return {}
    first = place % groups * max(own, most)
    return {DEVICES: ",".join(gpus[first : first + own])}
