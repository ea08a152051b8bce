"""Tests of the verdict in words, on synthetic figures."""

import dataclasses
from collections.abc import Mapping

import pytest

from grappe.plan import Plan
from grappe.profiling.phases import IN_A_STEP
from grappe.verbs.measure import verdict
from grappe.verbs.measure.points import (
    Measurement,
    Measurements,
    ProcessTimes,
    TimedRun,
    baseline,
    efficiency,
    efficiency_loss,
)
from grappe.verbs.measure.verdict import table

NONE = dict.fromkeys(IN_A_STEP, 0.0)
COMPUTE = {"forward": 0.004, "backward": 0.006}


def point(*each: Mapping[str, float], plan: str = "", joules: float | None = None, **fields) -> Measurement:
    """A point whose processes spend `each` seconds on the phases of a step."""
    step, degrees = max(sum(phases.values()) for phases in each), Plan.parse(plan)
    processes = [
        ProcessTimes(rank=rank, host="a", step=step, phases={**NONE, **phases}, memory=1, held={})
        for rank, phases in enumerate(each)
    ]
    trial = TimedRun(processes=processes, joules=joules)
    known = {"batch": 64, "cores": 8, "workers": 0, "slices": degrees.data_parallel, **fields}
    return Measurement(plan=plan, processes=degrees.processes, trials=[trial], **known)


def said(*points: Measurement) -> str:
    return "\n".join(verdict.sentences(points))


def test_lost_adds_up_to_what_is_missing() -> None:
    alone = point({**COMPUTE, "data": 0.001})
    pair = point({**COMPUTE, "communication": 0.002}, {**COMPUTE, "forward": 0.006}, plan="replicate=2")
    gone = efficiency_loss(pair, alone)
    assert sum(gone.values()) == pytest.approx(1 - efficiency(pair, alone))
    assert gone["imbalance"] == pytest.approx(0.002 / 0.024)
    assert gone["communication"] == pytest.approx(0, abs=1e-9)


def test_efficiency_is_of_one_batch_or_of_equal_slices_on_one_device() -> None:
    alone, pair = point(COMPUTE), point(COMPUTE, COMPUTE, plan="replicate=2")
    larger, weak = point(COMPUTE, batch=256), point(COMPUTE, COMPUTE, plan="replicate=2", batch=128)
    gpu = point(COMPUTE, plan="device=cuda", device="NVIDIA H100")
    failed = Measurement(plan="", batch=0, processes=0, slices=0, failure="no")
    points = [failed, alone, pair, larger, weak, gpu]
    assert [baseline(each, points) for each in points[1:]] == [None, alone, None, alone, None]
    shown = table(points)
    columns = {str(column.header): list(column.cells) for column in shown.columns}
    assert columns["efficiency"] == ["", "", "50%", "", "100%", ""] and "J a sample" not in columns
    figures = Measurements(points).to_pandas()
    assert list(figures["failure"].fillna("")) == ["no", "", "", "", "", ""]
    assert figures["efficiency"][2] == pytest.approx(0.5) and figures["forward"][1] == pytest.approx(0.4)
    assert len(columns["samples/s"]) == len(points)


@pytest.mark.parametrize(
    ("workers", "data", "needed"), [(0, 0.02, 3), (0, 0.0005, None), (2, 0.02, 7), (None, 0.02, None)]
)
def test_workers_follow_from_how_long_a_batch_takes(workers, data, needed) -> None:
    """Computing takes 10 ms; alone a process loads in `data`; two that cannot keep up give a batch each 30 ms."""
    one = point({**COMPUTE, "data": data}, workers=workers)
    assert verdict.advised_workers(one) == needed
    if needed:
        assert f"use workers={needed}" in said(one)
    elif workers is None:
        assert "in memory" in said(one)
    else:
        assert "waits" not in said(one)


def test_more_workers_than_anybody_has_are_not_advised() -> None:
    slow = point({**COMPUTE, "data": 0.3}, device="NVIDIA H100", plan="device=cuda")
    assert "the GPU waits for data 97% of the time" in said(slow)
    assert "store the samples decoded" in said(slow)
    assert verdict.larger_batch([slow]) == [(Plan(device="cuda"), 256)]
    assert verdict.larger_batch([slow, point(COMPUTE, batch=32)]) == []


def test_a_slow_process_is_named_with_what_it_is_slow_in() -> None:
    quick = {**COMPUTE, "communication": 0.02}
    slow = {"forward": 0.024, "backward": 0.006}
    told = said(point(quick, quick, slow, quick, plan="replicate=4"))
    assert "process 2 on a delays the others" in told
    assert "most of it in forward" in told
    assert "communication:" not in told  # it is waiting, and has been named
    even = {**COMPUTE, "communication": 0.001}
    assert "delays" not in said(point(even, even, plan="replicate=2"))
    crowded = said(point(quick, slow, plan="replicate=2", cores=1))
    assert "delays" not in crowded and "2 processes with 1 thread each share 1 cores" in crowded


def test_small_slices_are_named() -> None:
    small = point(COMPUTE, batch=4)
    large = point({"forward": 0.006, "backward": 0.009}, batch=64)
    assert "slices of 4 samples are small: a sample takes 10.7 times" in said(small, large)
    assert "small:" not in said(large, point({"forward": 0.012, "backward": 0.018}, batch=128))


def test_too_small_for_a_gpu() -> None:
    cpu = point(COMPUTE, COMPUTE, plan="device=cpu,replicate=2", device="cpu")
    gpu = point({"forward": 0.012, "backward": 0.018}, plan="device=cuda", device="NVIDIA H100")
    told = said(gpu, cpu)
    assert "too small for a GPU at this batch size: 2 CPU processes are faster (3.0 times)" in told
    assert "2.0 times as fast" in said(point(COMPUTE, device="NVIDIA H100"), point({"forward": 0.02}))


def test_scaling_says_where_efficiency_is_lost() -> None:
    alone = point({"forward": 0.040})
    two = point({"forward": 0.025}, {"forward": 0.025}, plan="replicate=2")
    told = said(alone, two)
    assert "2 processes are 1.6 times as fast as 1 (efficiency 80%" in told
    assert "most is lost to smaller slices or shared cores, 20%" in told
    worse = point({"forward": 0.05}, {"forward": 0.05}, plan="replicate=2")
    assert "more processes than 1 do not help" in said(alone, worse)
    slower = point({"forward": 0.05}, {"forward": 0.05}, plan="shard=2")
    assert "2 processes are 1.6 times as fast as 1" in said(alone, two, slower), "of both the faster"
    caches = point({"forward": 0.01, "communication": 0.005}, {"forward": 0.01, "communication": 0.005}, plan="shard=2")
    told = said(alone, caches)
    assert "2 processes are 2.7 times as fast as 1 (efficiency 133%)" in told, "nothing is lost"


@pytest.mark.parametrize("keys", ["schedule=1f1b", "schedule=gpipe", "schedule=interleaved,stages=2"])
def test_pipelines_scale_like_other_plans(keys: str) -> None:
    """A schedule is no plan of one process: what is compared without degrees is without it, too."""
    alone = point(COMPUTE, plan="microbatches=4")
    half = {name: seconds / 2 for name, seconds in COMPUTE.items()}
    two = point(half, half, plan=f"pipeline=2,microbatches=4,{keys}")
    assert "2 processes are 2.0 times as fast as 1" in said(alone, two)


def test_more_threads_than_cores() -> None:
    crowd = point(COMPUTE, COMPUTE, plan="replicate=2", cores=2, threads=2)
    assert "2 processes with 2 threads each share 2 cores" in said(crowd)


def test_energy_and_speed_may_disagree() -> None:
    told = said(point(COMPUTE, joules=0.1), point(COMPUTE, COMPUTE, batch=128, plan="replicate=2", joules=0.2))
    assert "fastest: replicate=2 (batch 128)" in told
    assert "least energy: one process (batch 64), 0.1 J a sample" in told


def test_nothing_measured() -> None:
    assert said(Measurement(plan="", batch=1, processes=1, slices=1, failure="no")) == "nothing could be measured"


def test_what_check_adds_is_said() -> None:
    assert "check adds 0.50% of the computing, by count" in said(
        point(*[COMPUTE] * 4, plan="exact=8,replicate=4,check=100")
    )


def test_nothing_is_called_faster_where_ranges_overlap_or_others_take_the_cores() -> None:
    def timed(plan: str, *steps: float, load: float = 0.0) -> Measurement:
        of_one = [point(*[{"forward": step}] * Plan.parse(plan).processes, plan=plan, load=load) for step in steps]
        return dataclasses.replace(of_one[0], trials=[each.trials[0] for each in of_one], cores=2, threads=1)

    apart = timed("", 0.02, 0.021), timed("replicate=2", 0.010, 0.011)
    assert "fastest: replicate=2" in said(*apart) and "times as fast" in said(*apart)
    overlapping = said(timed("", 0.02, 0.012), timed("replicate=2", 0.010, 0.013))
    assert "overlap: none is called faster" in overlapping and "times as fast" not in overlapping
    once = said(timed("", 0.02), timed("replicate=2", 0.0198))
    assert "less than 5 % apart" in once and "times as fast" not in once
    busy = said(*(dataclasses.replace(each, load=15.0) for each in apart))
    assert "(load 15): no plan is called faster" in busy and "fastest" not in busy
