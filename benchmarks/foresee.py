"""Predicted memory beside measured memory, of tasks under plans: `python -m benchmarks.foresee --help`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from grappe.launch.rank import ProcessRank
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.training.watchers.base import RunInfo, Watcher
from grappe.training.worker import worker as train_worker

BEGUN = "grappe training begins"


class Begun(Watcher):
    """Notes in the profile when the first step begins."""

    def started(self, info: RunInfo) -> None:
        with torch.profiler.record_function(BEGUN):
            pass


def measured(request: Request, process: ProcessRank, rendezvous_folder: Path) -> list[dict]:
    """Runs one process of a training of a few steps; on process 0 returns every process's bytes. Collective.

    Counted is what torch's allocator gives, from the beginning of the process: its peak in the steps, and before them.
    """
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        result = train_worker(request, process, rendezvous_folder)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    begun = min(event["ts"] for event in events if event["name"] == BEGUN)
    levels = sorted(
        (event["ts"], event["args"]["Total Allocated"])
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0
    )
    found = {
        "peak": max((level for at, level in levels if at >= begun), default=0),
        "start": max((level for at, level in levels if at < begun), default=0),
    }
    (request.base / f"{process.rank}.json").write_text(json.dumps(found))
    if process.rank:
        return []
    held = [one["held"] for one in Run(result.run).read_description()["costs"]]
    return [{"held": one} for one in held]
