"""Facts of a training's start: in run.json, and as lines for the user."""

from pathlib import Path

import pytest

from grappe.training.reporting import lines
from grappe.training.run import Run
from tests.training.test_training import train

FACTS = {
    "nodes": {"n0": {"V100": 4}, "n1": {"V100": 4}},
    "processes": 8,
    "threads": 10,
    "workers": 1,
    "parameters": 25_557_032,
    "inputs": [[32, 3, 224, 224]],
    "steps_per_epoch": 5005,
    "optimizer": {"class": "SGD", "groups": 2, "lr": 0.1, "momentum": 0.9},
}


def test_lines_for_the_user() -> None:
    first, second = lines(FACTS)
    assert first == "2 nodes: n0 (4 x V100), n1 (4 x V100); 1 data worker for each process"
    assert second == (
        "25,557,032 parameters, SGD(lr=0.1, momentum=0.9, 2 groups), inputs [32, 3, 224, 224], 5,005 steps an epoch"
    )


def test_workers_that_memory_does_not_need_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(tmp_path / "run", steps=1, plan="threads=1,workers=2")
    assert "0 data workers for each process (not 2: the samples are in memory)" in capsys.readouterr().out


def test_of_many_nodes_a_few_are_named() -> None:
    first, _ = lines({**FACTS, "nodes": {f"n{number}": {"V100": 4} for number in range(6)}})
    assert first.startswith("6 nodes: n0 (4 x V100), n1 (4 x V100), n2 (4 x V100), n3 (4 x V100) and 2 more;")


def test_a_training_says_and_keeps_them(tmp_path: Path) -> None:
    run = Run(train(tmp_path / "run").run)
    start = run.read_description()["start"]
    assert start["processes"] == 1
    assert start["parameters"] > 0
    assert start["steps_per_epoch"] > 0
    assert start["optimizer"]["class"]
    epochs = list(run.records("epoch"))
    steps = [record for record in run.records("step") if record["epoch"] == epochs[0]["epoch"]]
    assert epochs[0]["steps"] == len(steps) == start["steps_per_epoch"]
    assert abs(epochs[0]["seconds"] - sum(record["seconds"] for record in steps)) < 1e-3
