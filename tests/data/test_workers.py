"""Data workers that are forked from a process with a past."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grappe.data.loader import training_loader
from grappe.launch.fork import run_in_fork
from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.plan import Plan
from tests.faults.resume_cell import Loaded
from tests.patience import PATIENCE_SECONDS


class Grave:
    """As a process group of an earlier training: must be buried where it was made."""

    def __init__(self) -> None:
        self.myself = self
        self.home = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.home:
            os._exit(1)  # torch's crashes, since its threads are not there


def test_workers_leave_their_parents_garbage_alone(tmp_path: Path) -> None:
    """A forked worker that collects a dead process group of its parent's crashes."""
    plan = Plan.parse("workers=1,threads=1,device=cpu")
    task = Loaded()
    loader = training_loader(task, task.data("train", tmp_path), plan, join(plan, ProcessRank(), tmp_path))
    gc.collect()
    gc.disable()
    Grave()
    eager = [True]  # a hook cannot be taken back
    os.register_at_fork(after_in_child=lambda: eager and (gc.set_threshold(1), gc.enable()))
    try:
        assert len(list(loader.batches(0, 3))) == 3
    finally:
        eager.clear()
        gc.enable()
        gc.collect()


def test_what_was_frozen_before_a_fork_stays_frozen() -> None:
    """Else each later search for garbage goes through all libraries that were imported before the processes."""
    before = gc.get_freeze_count()
    assert before > 100_000, "tests/conftest.py freezes"
    assert run_in_fork(lambda: str(gc.isenabled())) == "True"
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0.9 * before


SCRIPT = """
import torch
import grappe

class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 640
    def __getitem__(self, index):
        return torch.ones(4), index % 2

model = torch.nn.Linear(4, 2)
loop = grappe.Loop("workers=2,threads=1,device=cpu")
loop.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step, _ in enumerate(loop.batches(Pairs(), batch_size=32, epochs=10)):
    if step == 3:
        raise ValueError("the user's own")
"""


@pytest.mark.slow
def test_a_script_that_fails_ends_although_its_workers_ignore_signals() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: the user's own\n")
