"""The written ledger when a training is killed: what it goes on from, with as many processes or with fewer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from grappe.data.batch import Batch
from grappe.watchers.sample_ledger import SampleLedger


def batch(step: int) -> Batch:
    return Batch(
        epoch=0, step=step, microbatches=(), samples=2, count=2.0, ids=np.array([2 * step, 2 * step + 1])
    )


def written(folder: Path, rank: int, steps: int) -> Path:
    ledger = SampleLedger(folder, rank)
    assert len(list(ledger.noted(iter(map(batch, range(steps))), "step"))) == steps
    ledger.flush()
    return folder / f"rank-{rank}.jsonl"


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    file = written(tmp_path, 0, 5)
    file.write_text(file.read_text()[:-9])
    ledger = SampleLedger(tmp_path, 0)
    ledger.cut_back(4, 1)
    assert list(ledger.noted(iter([batch(4)]), "step"))
    ledger.flush()
    assert steps(file) == [1, 2, 3, 4, 5]


def test_processes_that_are_no_more_are_cut_back_as_well(tmp_path: Path) -> None:
    files = [written(tmp_path, rank, 5) for rank in range(4)]
    for rank in range(2):
        SampleLedger(tmp_path, rank).cut_back(3, 2)
    assert [steps(file) for file in files] == [[1, 2, 3]] * 4
