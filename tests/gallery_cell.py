"""Trains a task of the gallery for a few steps, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grappe import tasks
from grappe.launch.rank import ProcessRank
from tests.parity import cell


def train(process: ProcessRank, rendezvous_folder: Path, file: str, plan: str, steps: int) -> dict[str, Any]:
    """As tests.parity.cell.train, of the task in `file`."""
    return cell.train(process, rendezvous_folder, tasks.find(file)(), plan, steps)
