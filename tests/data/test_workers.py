"""Data workers that are forked from a process with a past."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from grappe.data.feed import training_feed
from grappe.place import Place
from grappe.plan import Plan
from grappe.world import join
from tests.faults.resume_cell import Loaded


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
    feed = training_feed(task, task.data("train", tmp_path), plan, join(plan, Place(), tmp_path))
    gc.collect()
    gc.disable()
    Grave()
    eager = [True]  # a hook cannot be taken back
    os.register_at_fork(after_in_child=lambda: eager and (gc.set_threshold(1), gc.enable()))
    try:
        assert len(list(feed.batches(0, 3))) == 3
    finally:
        eager.clear()
        gc.enable()
        gc.collect()
