"""Counts the messages that a step's collectives really send, as torch's profiler sees them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.plan import Plan
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.task_reference import TaskReference
from grappe.training.worker import worker as train_worker

GLOO, UPDATE = "gloo:", "Optimizer.step"


def recorded(request: Request, process: ProcessRank, rendezvous_folder: Path) -> list[str]:
    """Trains; returns the collectives between the first and the second update."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        train_worker(request, process, rendezvous_folder)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    spans = [one for one in events if one.get("ph") == "X"]
    first, second = sorted(one["ts"] for one in spans if one["name"].startswith(UPDATE))[:2]
    return [
        one["name"].removeprefix(GLOO)
        for one in spans
        if one["name"].startswith(GLOO) and first < one["ts"] < second
    ]


def sent(task: str, plan: str) -> list[str]:
    """Returns the collectives of a step on process 0."""
    with tempfile.TemporaryDirectory() as folder:
        request = Request(
            task=TaskReference.of(task, {}),
            plan=Plan.parse(plan),
            base=Path(folder),
            run=Path(folder) / "run",
            quiet=True,
            options=Options(steps=3, steps_only=True),
        )
        return start("tests.foresight.messages:recorded", request, request.plan, run=request.run)
