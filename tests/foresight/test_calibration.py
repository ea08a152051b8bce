"""A calibration is read as it was written; another machine's, and what is none, is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from grappe.errors import UsageError
from grappe.foresight.calibration import Calibration, Machine, Overhead, file_here, read, write
from grappe.foresight.links import COLLECTIVES, MEETING, SIZES, seconds

MADE = Calibration(
    machine=Machine.here(),
    overheads={"one": Overhead(step=1e-4, forward=5e-6, update=-1e-6)},
    links={
        "2": {**dict.fromkeys(COLLECTIVES, ((256.0, 1e-4), (1e6, 1e-3))), MEETING: ((1e-3, 1e-4),)},
    },
    flops={"fp32/1": 1e10},
    bandwidth={"1": 1e10},
    operators={"1x1": {"aten.mm.default": 1e-3}},
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "calibration.json"
    assert read(file) is None
    write(MADE, file)
    assert read(file) == MADE


def test_it_lies_in_the_users_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert file_here().parent == tmp_path / "grappe"


@pytest.mark.parametrize("what", ["torch", "processor", "cores"])
def test_that_of_another_machine_is_refused(tmp_path: Path, what: str) -> None:
    other = {"torch": "1.0", "processor": "abacus", "cores": 1000}[what]
    write(
        dataclasses.replace(MADE, machine=dataclasses.replace(MADE.machine, **{what: other})),
        tmp_path / "a.json",
    )
    with pytest.raises(UsageError, match=rf"another machine \({what}: .*grappe doctor --calibrate"):
        read(tmp_path / "a.json")


ONE = dataclasses.asdict(Overhead())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"form": 0}, "another version of grappe"),
        ({"machine": []}, "in the entry machine:"),
        ({"machine": None}, "in the entry machine:"),
        ({"machine": {"processor": "abacus", "cores": 2}}, "in the entry machine.torch:"),
        ({"overheads": {}}, "in the entry overheads.one:"),
        ({"overheads": {"replicate": ONE}}, "in the entry overheads.one:"),
        ({"overheads": {"one": {"step": 0.1}}}, "in the entry overheads.one.forward:"),
        ({"overheads": {"one": {**ONE, "step": "__import__('os')"}}}, "in the entry overheads.one.step:"),
        ({"overheads": {"one": {**ONE, "step": 1e400}}}, "in the entry overheads.one.step:"),
        ({"overheads": {"one": ONE, "zero1": 3}}, "in the entry overheads.zero1:"),
        ({"links": None}, "in the entry links:"),
        ({"links": {"2": 3}}, "in the entry links.2:"),
        ({"links": {"2": {"all_reduce": [[1]]}}}, "in the entry links.2.all_reduce:"),
        ({"links": {"2": {"all_reduce": 3}}}, "in the entry links.2.all_reduce:"),
        ({"links": {"2": {}}}, "in the entry links.2.all_reduce:"),
        ({"links": {"2": {name: [[256, 1e-4]] for name in COLLECTIVES}}}, "in the entry links.2.meeting:"),
        ({"flops": {}}, "in the entry flops:"),
        ({"flops": {"fp32/1": -1}}, "in the entry flops.fp32/1:"),
        ({"flops": {"fp32/1": True}}, "in the entry flops.fp32/1:"),
        ({"bandwidth": {}}, "in the entry bandwidth:"),
        ({"operators": {"1x1": {"x": float("nan")}}}, "in the entry operators.1x1.x:"),
        ({"operators": {"1x1": {"x" * 30_000: 1}}}, "in the entry operators.1x1:"),
        ({"operators": 3}, "in the entry operators:"),
    ],
)
def test_what_is_no_calibration_is_refused(tmp_path: Path, change: dict, says: str) -> None:
    write(MADE, tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(UsageError, match="grappe doctor --calibrate") as error:
        read(tmp_path / "a.json")
    assert says in str(error.value)


def test_a_machine_of_one_core_has_no_links(tmp_path: Path) -> None:
    alone = dataclasses.replace(MADE, links={}, operators={})
    write(alone, tmp_path / "a.json")
    assert read(tmp_path / "a.json") == alone


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(UsageError, match="grappe doctor --calibrate"):
        read(tmp_path / "a.json")


def test_new_operators_are_added_to_those_of_their_setting() -> None:
    more = MADE.with_operators("1x1", {"aten.add.Tensor": 2e-3}).with_operators("2x1", {"a": 1.0})
    assert more.operators == {"1x1": {"aten.mm.default": 1e-3, "aten.add.Tensor": 2e-3}, "2x1": {"a": 1.0}}


def test_messages_between_measured_sizes_are_on_lines() -> None:
    points = ((0.0, 1.0), (10.0, 2.0), (20.0, 5.0))
    assert [seconds(points, size) for size in (0, 5, 10, 15, 30)] == [1.0, 1.5, 2.0, 3.5, 8.0]
    assert seconds(((256.0, 0.5),), 1e9) == 0.5
    assert list(SIZES) == sorted(SIZES)
