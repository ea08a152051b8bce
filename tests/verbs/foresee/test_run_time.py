"""The source of the time of a run's step: the calibration of its very machine, or its GPU's data sheet."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from grappe.foresight.calibration import write
from grappe.foresight.devices import devices
from grappe.verbs.foresee.run_time import CALIBRATION, DATA_SHEET, step_measured, time_source
from grappe.verbs.foresee.times import UNCALIBRATED
from tests.foresight.test_calibration import MADE

HERE = MADE.machine


def cost(**changes: Any) -> dict[str, Any]:
    timing = {"steps": 100, "step": {"median": 0.01}}
    return {"host": "one", "device": "cpu", "cores": HERE.cores, "timing": timing, **changes}


def described(**changes: Any) -> dict[str, Any]:
    return {
        "device": "cpu",
        "processor": f"{HERE.processor}, AVX2",
        "versions": {"torch": HERE.torch},
        "costs": [cost(), cost(cores=0)],
        **changes,
    }


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write(MADE)


def test_a_run_of_this_machine_has_its_calibration(calibrated: None) -> None:
    source, why = time_source(described())
    assert source is not None and not why
    assert source.kind == CALIBRATION and source.calibration == MADE


def test_operators_that_are_learned_make_no_other_calibration_and_a_new_measurement_does(
    calibrated: None,
) -> None:
    source, _ = time_source(described())
    assert source is not None and source.calibration is not None
    learned = dataclasses.replace(source, calibration=MADE.with_operators("2x1", {"one": 1.0}))
    anew = dataclasses.replace(source, calibration=dataclasses.replace(MADE, flops={"fp32/1": 2e10}))
    assert source.key == learned.key != anew.key


@pytest.mark.parametrize(
    "changes",
    [
        {"processor": "another, AVX2"},
        {"versions": {"torch": "1.0"}},
        {"versions": 3},
        {"costs": [cost(cores=HERE.cores + 1)]},
        {"costs": [cost(), cost(cores=0, host="two")]},
        {"costs": [cost(cores="many")]},
    ],
)
def test_a_run_of_another_machine_has_none(calibrated: None, changes: dict[str, Any]) -> None:
    source, why = time_source(described(**changes))
    assert source is None and "another processor" in why


def test_without_a_calibration_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert time_source(described()) == (None, UNCALIBRATED)


def test_a_gpu_has_its_data_sheet_by_torchs_name_for_it() -> None:
    costs = [cost(device="NVIDIA A100-SXM4-40GB", host=host) for host in ("one", "one", "two")]
    source, _ = time_source(described(device="cuda", costs=costs))
    assert source is not None and source.fabric is not None
    assert source.kind == DATA_SHEET and source.fabric.node == 2
    assert source.fabric.device.names == ("A100, 40 GB",)
    source, why = time_source(described(device="cuda", costs=[cost(device="Voodoo 2")]))
    assert source is None and "data sheet" in why
    assert time_source(described(device="cuda", costs=None))[0] is None


def test_no_two_data_sheets_are_of_the_same_name() -> None:
    names = [name for one in devices() for name in one.reported]
    assert len(names) == len(set(names)) >= len(devices())


@pytest.mark.parametrize(
    ("costs", "found"),
    [
        ([cost(), cost(timing={"steps": 100, "step": {"median": 0.02}})], 0.02),
        ([cost(timing={"steps": 4, "step": {"median": 0.02}})], None),
        ([cost(timing={"steps": 100, "step": {"median": "NaN"}})], None),
        ([cost(timing={"steps": 100, "step": {"median": float("inf")}})], None),
        ([cost(timing=None)], None),
        ([{}], None),
        ("many", None),
        ([], None),
    ],
)
def test_the_median_step_of_the_slowest_process(costs: Any, found: float | None) -> None:
    assert step_measured({"costs": costs}) == found
