"""Trains for the GPU proof, and compares trained weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import grappe
from benchmarks.gpu.part import Part
from grappe.errors import GrappeError, PlanError
from grappe.launch import mps


def plan_on(part: Part, plan: str) -> str:
    """Returns `plan` for the part's device; all its processes share the one GPU."""
    processes = grappe.Plan.parse(plan).processes
    shared = f",per_device={processes},backend=gloo" if part.on_gpu and processes > 1 else ""
    return f"{plan},device={part.device},threads=1{shared}".lstrip(",")


def sharing(part: Part, plan: str) -> str:
    """Says how the plan's processes share the GPU: by MPS, or in turns where it is not installed; "" if none do."""
    on = grappe.Plan.parse(plan_on(part, plan))
    if not part.on_gpu or on.per_device == 1:
        return ""
    return ", MPS on" if mps.is_needed(on) else f", MPS off (no {mps.PROGRAM} here)"


def train(
    part: Part, task: grappe.Task, plan: str, name: str, *, watchers: Sequence[grappe.Watcher] = (), **options: object
) -> grappe.Run:
    """Trains into a folder of the part's own, `name`, in processes of its own."""
    return grappe.train(
        task,
        plan_on(part, plan),
        part.scratch / name,
        data=part.scratch,
        options=grappe.Options(**options),  # type: ignore[arg-type]
        watchers=watchers,
    )


def tried(part: Part, task: grappe.Task, plan: str, name: str, **options: Any) -> grappe.Run | None:
    """Trains; None where the plan cannot be had here, which is not tried, or where the training failed."""
    try:
        return train(part, task, plan, name, **options)
    except PlanError as error:
        part.not_tried(plan, str(error))
    except GrappeError as error:
        part.check(plan, False, f"{type(error).__name__}: {error}")
    return None


def read_usage(folder: Path) -> list[dict[str, Any]]:
    """Reads what a run's process 0 has used, in parts one after the other."""
    return [json.loads(line) for line in (folder / "usage.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Reads a run's last weights, on the CPU."""
    return {name: tensor.detach().cpu() for name, tensor in grappe.load(folder).state_dict().items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Returns the largest |a - b| / |a| of a tensor."""
    return max(
        float((tensor.double() - b[name].double()).norm() / tensor.double().norm().clamp_min(1e-30))
        for name, tensor in a.items()
    )


def total_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Returns |a - b| / |a| over all tensors together."""
    flat_a, flat_b = (torch.cat([one[name].double().flatten() for name in a]) for one in (a, b))
    return float((flat_a - flat_b).norm() / flat_a.norm())


def sha256(tensors: dict[str, torch.Tensor]) -> str:
    """Hashes names and bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
