"""The meter: what a run used, over its restarts and processes, and what it writes down."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.profiling import energy
from grappe.profiling.chronometer import Chronometer, timing
from grappe.profiling.phases import BACKWARD, COMMUNICATION, FORWARD, IN_A_STEP, PHASES
from grappe.training.run import Run
from grappe.training.watchers.meter import Meter, Usage, slow_node, used
from tests.training.test_training import train

ONE = Usage(
    rank=0,
    host="a",
    device="cpu",
    seconds=3600.0,
    cpu_seconds=1800.0,
    cores=8,
    threads=1,
    workers=None,
    loading="",
    gpus=1,
    peak={},
    baseline=0,
    held={},
    joules={"processors": 100.0, "gpu": 50.0},
    watts={"gpu": 300.0},
    why={},
    sent={},
    timing=None,
    step=5,
    samples=50,
)


def test_hours_are_those_of_all_that_was_lent() -> None:
    other = dataclasses.replace(ONE, rank=1, cores=0, joules={"gpu": 70.0}, seconds=3500.0)
    told = used([ONE, other], {})
    assert told["core_hours"] == pytest.approx(8)
    assert told["gpu_hours"] == pytest.approx(2)
    assert told["cpu_hours"] == pytest.approx(1)
    assert told["joules"] == {"processors": 100.0, "gpu": 120.0}
    again = used([ONE], told)
    assert again["core_hours"] == pytest.approx(16)
    assert again["joules"] == {"processors": 200.0, "gpu": 170.0}
    assert again["samples"] == 100


def test_the_use_of_gpus_is_their_mean_by_hours() -> None:
    first = used([dataclasses.replace(ONE, gpu=0.5), dataclasses.replace(ONE, gpu=0.7)], {})
    assert first["gpu"] == pytest.approx(0.6)
    again = used([dataclasses.replace(ONE, gpu=0.9)], first)  # two hours before, one now
    assert again["gpu"] == pytest.approx(0.7)
    assert "gpu" not in used([ONE], {}), "the GPU does not tell"


class MockGpu:
    """Stands in for an NVIDIA GPU, which this machine has none of: half of the time a kernel runs."""

    def __init__(self) -> None:
        self.asked = 0

    def joules(self) -> float:
        return 0.0

    def utilisation(self) -> float:
        self.asked += 1
        return float(self.asked % 2)


def test_the_meter_of_each_process_asks_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "gpu_counters", lambda index: energy.EnergyCounters(counters=(MockGpu(),)))  # type: ignore[arg-type]
    process = ProcessRank(rank=1, size=2, local_rank=1, local_size=2)
    world = World(process=process, device=torch.device("cpu"))
    device = dataclasses.replace(world, device=torch.device("cuda", 0))
    meter = Meter(device, Chronometer(world.device, 0.0), per_device=1, began=0.0, baseline=0)
    monkeypatch.setattr(meter, "_world", world)  # whose memory can be read here
    assert meter.usage().gpu is None
    for _ in range(4):
        meter.sample()
    assert meter.usage().gpu == 0.5


def worked(rank: int, host: str, forward: float, steps: int = 200) -> Usage:
    rows = np.zeros((steps, len(IN_A_STEP)))
    rows[:, FORWARD], rows[:, BACKWARD], rows[:, COMMUNICATION] = forward, 0.01, 0.02 - forward
    return dataclasses.replace(ONE, rank=rank, host=host, timing=timing("host", rows, [0.0] * len(PHASES)))


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ((0.005, 0.005, 0.013, 0.015), True),
        ((0.005, 0.005, 0.005, 0.015), False),  # one process of a node: the node is not slow
        ((0.005, 0.005, 0.011, 0.012), False),  # by a fifth of the step
    ],
)
def test_a_node_is_slow_whose_processes_all_have_more_to_do(seconds: tuple[float, ...], slow: bool) -> None:
    usages = [worked(rank, f"n{rank // 2}", each) for rank, each in enumerate(seconds)]
    evidence = "process 2 was slow: 23 ms of work a step, those of other nodes 15 ms; most of it in forward"
    assert slow_node(usages) == ({"n1": evidence} if slow else {})
    assert not slow_node([dataclasses.replace(usage, host="n0") for usage in usages])
    assert not slow_node([*usages, worked(4, "n2", 0.005, steps=99)])
    assert not slow_node([*usages, dataclasses.replace(ONE, rank=4, host="n2")])


def test_a_start_that_could_not_be_measured_leaves_no_sum() -> None:
    dark = dataclasses.replace(ONE, joules={"processors": None}, why={"processors": "no powercap"})
    told = used([dark], {})
    assert told["joules"] == {"processors": None}
    assert told["why"] == {"processors": "no powercap"}
    assert used([ONE], told)["joules"]["processors"] is None


def test_a_run_knows_what_it_used(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=4)
    first = Run(tmp_path / "run").read_description()["used"]
    train(tmp_path / "run")
    run = Run(tmp_path / "run")
    known = run.read_description()
    assert known["used"]["samples"] == 87  # three epochs of 29, over both starts
    assert known["used"]["seconds"] > first["seconds"]
    (process,) = known["costs"]
    weights = process["held"]["parameters"]
    assert process["held"]["gradients"] == weights
    assert process["held"]["optimizer"] > 2 * weights  # Adam's two moments, and counts
    lines = [json.loads(line) for line in (run.folder / "usage.jsonl").read_text().splitlines()]
    assert sum(line["steps"] for line in lines) == 9
    assert lines[-1]["step"] == 9
    assert all(line["seconds"] > 0 and line["memory"]["host"] > 0 for line in lines)
    inside = sum(seconds for line in lines for seconds in line["phases"].values())
    assert inside == pytest.approx(known["used"]["seconds"], rel=0.5)
