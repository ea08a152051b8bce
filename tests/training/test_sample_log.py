"""The sample log when a training is killed: what it goes on from, with as many processes or with fewer."""

import json
from pathlib import Path

import numpy as np

from grappe.data.batch import Batch
from grappe.training.watchers.curves import SampleLog
from tests.training.watchers.made_up import run_info


def batch(step: int) -> Batch:
    return Batch(epoch=0, step=step, microbatches=(), samples=2, count=2.0, ids=np.array([2 * step, 2 * step + 1]))


def log(folder: Path, rank: int, steps: range, processes: int = 1) -> Path:
    """Logs `steps` of a start with so many processes."""
    one = SampleLog()
    one.started(run_info(folder, rank=rank, world_size=processes, start=steps.start))
    for step in steps:
        one.add("step", batch(step))
    one.ended(None)
    return folder / f"samples/rank-{rank}.jsonl"


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    file = log(tmp_path, 0, range(5))
    file.write_text(file.read_text()[:-9])
    log(tmp_path, 0, range(4, 5))
    assert steps(file) == [1, 2, 3, 4, 5]


def test_processes_that_are_no_more_are_cut_back_as_well(tmp_path: Path) -> None:
    files = [log(tmp_path, rank, range(5), processes=4) for rank in range(4)]
    for rank in range(2):
        log(tmp_path, rank, range(3, 3), processes=2)
    assert [steps(file) for file in files] == [[1, 2, 3]] * 4
