"""Trains for the GPU proof, and compares trained weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

import grappe
from benchmarks.gpu.part import Part


def plan_on(part: Part, plan: str) -> str:
    """Returns `plan` for the part's device; all its processes share the one GPU."""
    processes = grappe.Plan.parse(plan).processes
    shared = f",per_device={processes},backend=gloo" if part.on_gpu and processes > 1 else ""
    return f"{plan},device={part.device},threads=1{shared}".lstrip(",")


def train(part: Part, task: grappe.Task, plan: str, name: str, **options: object) -> grappe.Run:
    """Trains into a folder of the part's own, `name`."""
    return grappe.train(
        task,
        plan_on(part, plan),
        part.scratch / name,
        data=part.scratch,
        options=grappe.Options(**options),  # type: ignore[arg-type]
    )


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
