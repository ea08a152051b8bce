"""Recorded operators are run, and each distinct call gets a time."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grappe.foresight import replay
from grappe.foresight.recording import Operator, Ref
from grappe.foresight.replay import ReplayRequest, replayed, worker
from grappe.foresight.sketch import Sketch
from grappe.foresight.update import update_recording
from grappe.launch.rank import ProcessRank
from grappe.profiling import memory
from tests.foresight.test_sketch import Normal, Small


def test_each_distinct_call_of_a_step_gets_a_time(tmp_path: Path) -> None:
    recording = Sketch(Normal(), Path("data"), records=True).trace(4).recording
    assert recording is not None
    before = torch.get_num_threads()
    try:
        found = worker(
            ReplayRequest(recordings=(recording,), threads=1, seconds=0.0), ProcessRank(), tmp_path
        )
    finally:
        torch.set_num_threads(before)
    assert set(found) == set(recording.counts)
    assert all(0 < took < 1 for took in found.values())


@pytest.mark.parametrize("keeps", [True, False])
def test_freed_memory_is_kept_as_in_a_training(keeps: bool, tmp_path: Path, monkeypatch) -> None:
    limits = []
    monkeypatch.setattr(memory, "mallopt", lambda **given: limits.append(given))
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (memory.resource.RLIM_INFINITY,) * 2)
    sketch = Sketch(Small(), Path("data"), records=True)
    recording = update_recording(sketch.task, sketch.mode, [("a", (8, 8), torch.float32)])
    threads = torch.get_num_threads()
    worker(
        ReplayRequest(recordings=(recording,), threads=threads, seconds=0.0, keeps=keeps),
        ProcessRank(),
        tmp_path,
    )
    assert bool(limits) == keeps


FAULTS = """
import resource, sys
from pathlib import Path
from grappe.foresight import replay
from grappe.foresight.recording import Operator, Recording, Ref
from grappe.launch.rank import ProcessRank

def ref(number, rows):
    return Ref(number, (rows, 1024), (1024, 1), 0, "float32")

def doubled(number):  # 4 MB, another number of rows each, so that each is a call of its own
    given, made = ref(number, 1024 + number), ref(100 + number, 1024 + number)
    return Operator("aten.mul.Scalar", (given, 2.0), (), (made,), 0, 0, False, ())

recording = Recording(
    operators=tuple(doubled(number) for number in range(30)),
    given=tuple((number, 4096 * (1024 + number), True) for number in range(30)),
)
faults, original = [], replay._pass

def counted(*arguments):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    found = original(*arguments)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found

replay._pass = counted
request = replay.ReplayRequest(recordings=(recording,), threads=1, seconds=0.5)
replay.worker(request, ProcessRank(), Path(sys.argv[1]))
print(max(faults[2:]))
"""


def test_a_pass_takes_no_memory_from_the_system_again(tmp_path: Path) -> None:
    """120 MB are free at a pass's end. Taking them anew is 30,000 page faults, which no training has."""
    command = [sys.executable, "-c", FAULTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 3000


def test_calls_that_are_known_are_not_timed(tmp_path: Path) -> None:
    recording = Sketch(Small(), Path("data"), records=True).trace(4).recording
    assert recording is not None
    products = frozenset(key for key in recording.counts if key.startswith("aten.mm"))
    request = ReplayRequest(
        recordings=(recording,), threads=torch.get_num_threads(), seconds=0.0, known=products
    )
    assert set(worker(request, ProcessRank(), tmp_path)) == set(recording.counts) - products


def test_several_processes_run_an_update_side_by_side() -> None:
    sketch = Sketch(Small(), Path("data"), records=True)
    recording = update_recording(sketch.task, sketch.mode, [("a", (8, 8), torch.float32)])
    assert set(replayed((recording,), threads=1, processes=2, seconds=0.0)) == set(recording.counts)


def test_an_output_that_is_not_computed_holds_numbers_that_are_quick_to_compute_with() -> None:
    rows = 1 << 20
    for _ in range(4):  # what such memory holds: integers, which are denormal as decimal numbers
        torch.ones(rows, dtype=torch.int32)
    ref = Ref(7, (rows,), (1,), 0, "float32")
    made = Operator("aten.relu.default", (), (), (ref,), mark=0, flops=0, view=False, ended=())
    storages: dict = {}
    replay._left(made, storages)
    values = torch.empty(0).set_(storages[7]).abs()
    assert values.max() <= 0.03
    assert not ((values > 0) & (values < torch.finfo(torch.float32).tiny)).any()


@pytest.mark.parametrize("holds", [True, False])
def test_gradients_stay_until_the_end_of_the_step(holds: bool, tmp_path: Path, monkeypatch) -> None:
    recording = Sketch(Normal(), Path("data"), records=True).trace(4).recording
    assert recording is not None and recording.gradients
    left: list[set[int]] = []

    def run(recording, storages, held, seen, found) -> None:
        original(recording, storages, held, seen, found)
        left.append(set(storages))

    original = replay._run
    monkeypatch.setattr(replay, "_run", run)
    threads = torch.get_num_threads()
    request = ReplayRequest(recordings=(recording,), threads=threads, seconds=0.0, holds=holds)
    worker(request, ProcessRank(), tmp_path)
    ended = recording.gradients & {number for one in recording.operators for number in one.ended}
    assert ended
    assert all(holds == (ended <= numbers) for numbers in left)


def test_a_call_that_returns_nothing_has_a_time(tmp_path: Path) -> None:
    sketch = Sketch(Small(), Path("data"), records=True)
    clipped = dataclasses.replace(sketch.task, clip=1.0)
    recording = update_recording(clipped, sketch.mode, [("a", (8, 8), torch.float32)])
    request = ReplayRequest(recordings=(recording,), threads=torch.get_num_threads(), seconds=0.0)
    assert any(key.startswith("aten._foreach_mul_") for key in recording.counts)
    assert set(worker(request, ProcessRank(), tmp_path)) == set(recording.counts)


def test_recordings_of_a_step_run_one_after_the_other(tmp_path: Path) -> None:
    sketch = Sketch(Small(), Path("data"), records=True)
    micro = sketch.trace(4).recording
    update = update_recording(sketch.task, sketch.mode, [("a", (8, 8), torch.float32)])
    assert micro is not None
    request = ReplayRequest(recordings=(micro, update), threads=torch.get_num_threads(), seconds=0.0)
    assert set(worker(request, ProcessRank(), tmp_path)) == {*micro.counts, *update.counts}
