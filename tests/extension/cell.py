"""Trains the extension's task in a process of the pool, which finds the operator where a test has built it."""

import sys
from pathlib import Path
from typing import Any

from grappe import finder
from grappe.launch.rank import ProcessRank
from tests.parity import cell

FOLDER = Path(__file__).parents[2] / "examples" / "extension"
TASK = FOLDER / "digits_swiglu.py"
SOURCE = FOLDER / "src" / "swiglu" / "csrc" / "swiglu.cpp"


def train(
    process: ProcessRank, rendezvous_folder: Path, built: str, python: bool, plan: str, steps: int
) -> dict[str, Any]:
    """As tests.parity.cell.train, with the operator, or with torch's own in its place."""
    if built not in sys.path:
        sys.path.insert(0, built)
    task = finder.find(str(TASK))(python=python)
    return cell.train(process, rendezvous_folder, task, plan, steps)
