"""Memory and steps foreseen of real runs, beside what they measured: traced once, and no code of a run is run."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from grappe.cli import foreseeing
from grappe.errors import RunError, UsageError
from grappe.foresight.calibration import read as read_calibration
from grappe.foresight.calibration import write as write_calibration
from grappe.training import task_reference
from grappe.training.run import Run
from grappe.verbs.foresee import history as module
from grappe.verbs.foresee.history import FILE, Compared, compared, errors, history
from grappe.verbs.foresee.history_table import sentences, write
from grappe.verbs.foresee.times import UNCALIBRATED
from grappe.verbs.report.gather import gather
from tests.foresight.test_calibration import MADE
from tests.parity.tasks import Images
from tests.training.test_training import train

STATES = ("parameters", "gradients", "optimizer")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run; its task is a module's, whose file the record outside of the run names."""
    folder = tmp_path_factory.mktemp("history") / "images"
    train(folder, Images(epochs=1, rule="adam"), steps=3)
    with pytest.MonkeyPatch.context() as patch:  # a machine that is not calibrated
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        compared(Run(folder))
    return Run(folder)


@pytest.fixture(autouse=True)
def uncalibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the calibration of the machine that runs the tests alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))


def untraced(*_: object) -> str:
    raise AssertionError("it was traced again")


def test_states_are_right_to_the_byte_and_a_process_is_foreseen_with_what_it_had_before(run: Run) -> None:
    found = compared(run)
    assert not found.why
    (cost,) = run.read_description()["costs"]
    assert found.states == found.states_measured == sum(cost["held"].values())
    assert {name: found.foreseen[name] for name in STATES} == cost["held"]
    assert cost["baseline"] > 50e6
    assert found.peak == cost["baseline"] + found.foreseen["with_copies"]
    assert found.peak_measured == cost["peak"]["host"]


def test_a_run_is_traced_once_and_again_when_it_has_changed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    first = compared(copy)
    monkeypatch.setattr(module, "_traced", untraced)
    assert compared(copy) == first
    copy.describe(plan="microbatches=2")
    assert "traced again" in compared(copy).why


@pytest.fixture
def calibrated(tmp_path: Path, uncalibrated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    write_calibration(MADE)


def test_a_step_is_foreseen_with_the_calibration_beside_the_measured_one(
    run: Run, tmp_path: Path, calibrated: None
) -> None:
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    (cost,) = copy.read_description()["costs"]
    cost["timing"] |= {"steps": 100}
    copy.describe(costs=[cost])
    found = compared(copy)
    assert found.step is not None and found.step_error is not None and not found.step_why
    assert found.step_measured == cost["timing"]["step"]["median"]
    assert found.step > MADE.overheads["one"].step
    assert read_calibration() != MADE  # its operators were run, and are known from now on
    assert found.states_error == 0  # from the same trace


def test_a_file_without_a_step_is_foreseen_anew_and_one_with_it_is_kept(
    run: Run, tmp_path: Path, calibrated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    old = json.loads((copy.folder / FILE).read_text())
    assert not old["step"]
    step = compared(copy).step
    assert step is not None and json.loads((copy.folder / FILE).read_text())["step"]["seconds"] == step
    monkeypatch.setattr(module, "_traced", untraced)
    assert compared(copy).step == step
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))  # elsewhere, what was foreseen here is read
    assert compared(copy).step == step
    (copy.folder / FILE).write_text(json.dumps({"of": old["of"], "foreseen": old["foreseen"]}))
    found = compared(copy)
    assert found.step is None and found.step_why == UNCALIBRATED and found.states_error == 0


def test_a_plan_whose_time_is_not_foreseen_keeps_its_memory(
    run: Run, tmp_path: Path, calibrated: None
) -> None:
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    copy.describe(plan="batchnorm=sync,threads=1")
    found = compared(copy)
    assert found.states == found.states_measured
    assert found.step is None and "batchnorm: its time is not foreseen" in found.step_why


def test_why_steps_are_missing_is_said_once_for_all_runs() -> None:
    def one(why: str) -> Compared:
        return Compared(run="", task="", plan="", device="cpu", step_why=why)

    lines = sentences([one(UNCALIBRATED), one("another"), one(UNCALIBRATED), one("")], [])
    assert lines == [
        f"the step of 2 runs is not foreseen: {UNCALIBRATED}",
        "the step of 1 run is not foreseen: another",
    ]


def test_a_task_that_has_changed_is_not_traced_and_no_option_is_named_that_is_not_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(task_reference, "_hash", lambda file: "another")
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    (copy.folder / FILE).unlink()
    found = compared(copy)
    assert "has changed since" in found.why and "train it again" in found.why and "--task" not in found.why
    assert "tracing" not in capsys.readouterr().err
    monkeypatch.setattr(task_reference, "run_around", lambda file: tmp_path)
    assert compared(copy).why.endswith("which is not there any more")


def test_a_strangers_run_says_why_and_its_task_is_not_imported(run: Run, tmp_path: Path) -> None:
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a run')")
    copy.describe(task=str(tmp_path / "evil.py"), id="0" * 32)
    found = compared(copy)
    assert found.why.endswith("grappe runs no code because a run names it")
    assert found.states is None


@pytest.mark.parametrize(
    "costs", [None, [], "many", [{"held": 3, "peak": {"host": "much"}}], [{"held": {"parameters": -1}}]]
)
def test_a_damaged_or_unfinished_run_is_told_of_without_an_error(
    run: Run, tmp_path: Path, costs: object
) -> None:
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    (copy.folder / FILE).write_text('{"of": 3, "foreseen": [1]}')
    copy.describe(costs=costs, task="nothing:Nothing", id="0" * 32)
    found = compared(copy)
    assert found.why and found.states_error is None and found.peak_error is None


def test_the_errors_of_all_runs_by_kind() -> None:
    def one(device: str, peak: int) -> Compared:
        return Compared(
            run="", task="", plan="", device=device, states=8, states_measured=8, peak=peak, peak_measured=100
        )

    states, gpu, cpu = errors([one("cuda", 101), one("cpu", 90), one("cpu", 80), one("cpu", 104)])
    assert (states.runs, states.worst) == (4, 0)
    assert gpu.median == gpu.worst == pytest.approx(0.01)
    assert (cpu.median, cpu.high, cpu.worst) == pytest.approx((0.1, 0.2, 0.2))
    steps = [
        Compared(run="", task="", plan="", device=device, step=step, step_measured=0.1)
        for device, step in (("cpu", 0.09), ("cpu", None), ("cpu", 0.12), ("cuda", 0.2))
    ]
    gpu, cpu = errors(steps)
    assert "data sheet" in gpu.what and gpu.worst == pytest.approx(1.0)
    assert "calibration" in cpu.what and (cpu.runs, cpu.worst) == (2, pytest.approx(0.2))
    assert errors([Compared(run="", task="", plan="", device="cpu")]) == []


def test_the_command_shows_a_row_for_each_run_and_writes_files(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base = run.folder.parent
    file = tmp_path / "history.json"
    assert foreseeing.foresee(str(base), history=True, out=file) == 0
    shown = capsys.readouterr().out
    assert "images" in shown and "off by 0.00 %" in shown
    known = json.loads(file.read_text())
    assert [one["run"] for one in known["runs"]] == ["images"]
    assert known["errors"][0]["worst"] == 0
    found = history(base)
    write(found, errors(found), tmp_path / "history.csv")
    (row,) = csv.DictReader((tmp_path / "history.csv").open())
    assert row["states"] == row["states_measured"] and row["foreseen_checkpoint"]
    with pytest.raises(UsageError, match=r"\.json or \.csv"):
        write(found, [], tmp_path / "history.txt")
    with pytest.raises(RunError, match="no run in"):
        history(tmp_path / "none")
    with pytest.raises(UsageError, match="--history"):
        foreseeing.foresee()


def test_a_report_has_both(run: Run) -> None:
    (shown,) = gather([run.folder])["runs"]
    assert shown["foreseen"]["states_error"] == 0
    assert shown["foreseen"]["peak_measured"] > shown["foreseen"]["states"]
