"""Memory and steps foreseen of real runs, beside what they measured: traced once, and no code of a run is run."""

import json
import shutil
from pathlib import Path

import pytest

from grappe.foresight.devices import devices
from grappe.training import task_reference
from grappe.training.run import Run
from grappe.verbs.foresee import run_forecast as module
from grappe.verbs.foresee.run_forecast import FILE, NO_DATA_SHEET, OF_A_CPU, fabric_of, foreseen_run
from grappe.verbs.report.report import gather
from tests.parity.tasks import Images
from tests.training.test_training import train

STATES = ("parameters", "gradients", "optimizer")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run; its task is a module's, whose file the record outside of the run names."""
    folder = tmp_path_factory.mktemp("history") / "images"
    train(folder, Images(epochs=1, rule="adam"), steps=3)
    foreseen_run(Run(folder))
    return Run(folder)


def untraced(*_: object) -> str:
    raise AssertionError("it was traced again")


def test_states_are_right_to_the_byte_and_a_process_is_foreseen_with_what_it_had_before(run: Run) -> None:
    found = foreseen_run(run)
    assert not found.why
    (cost,) = run.read_description()["costs"]
    assert found.states == found.states_measured == sum(cost["held"].values())
    assert {name: found.foreseen[name] for name in STATES} == cost["held"]
    assert cost["baseline"] > 50e6
    assert found.peak == cost["baseline"] + found.foreseen["with_copies"]
    assert found.peak_measured == cost["peak"]["host"]


def test_a_run_is_traced_once_and_again_when_it_has_changed(run: Run, tmp_path: Path, monkeypatch) -> None:
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    first = foreseen_run(copy)
    monkeypatch.setattr(module, "_traced", untraced)
    assert foreseen_run(copy) == first
    copy.describe(plan="microbatches=2")
    assert "traced again" in foreseen_run(copy).why


def test_a_task_that_has_changed_is_not_traced_and_no_option_is_named_that_is_not_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(task_reference, "_hash", lambda file: "another")
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    (copy.folder / FILE).unlink()
    found = foreseen_run(copy)
    assert "has changed since" in found.why and "train it again" in found.why and "--task" not in found.why
    assert "tracing" not in capsys.readouterr().err
    monkeypatch.setattr(task_reference, "run_around", lambda file: tmp_path)
    assert foreseen_run(copy).why.endswith("which no longer exists")


def test_a_strangers_run_says_why_and_its_task_is_not_imported(run: Run, tmp_path: Path) -> None:
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a run')")
    copy.describe(task=str(tmp_path / "evil.py"), id="0" * 32)
    found = foreseen_run(copy)
    assert found.why.endswith("grappe does not run code because a run names it")
    assert found.states is None


@pytest.mark.parametrize("costs", [[], [{"held": 3, "peak": {"host": "much"}}], [{"held": {"parameters": -1}}]])
def test_a_damaged_or_unfinished_run_is_told_of_without_an_error(run: Run, tmp_path: Path, costs: object) -> None:
    copy = Run(shutil.copytree(run.folder, tmp_path / "copy"))
    (copy.folder / FILE).write_text('{"of": 3, "foreseen": [1]}')
    copy.describe(costs=costs, task="nothing:Nothing", id="0" * 32)
    found = foreseen_run(copy)
    assert found.why and not {found.as_json()[f"{name}_error"] for name in ("states", "peak")} - {None}


def test_a_report_has_both(run: Run) -> None:
    (shown,) = gather([run.folder], foresee=True)["runs"]
    assert shown["foreseen"]["states_error"] == 0
    assert shown["foreseen"]["peak_measured"] > shown["foreseen"]["states"]


A100 = "NVIDIA A100-SXM4-40GB"


def on_gpu(run: Run, folder: Path, device: str = A100) -> Run:
    """A copy of the run as if it had been on one GPU."""
    copy = Run(shutil.copytree(run.folder, folder / "copy"))
    (cost,) = copy.read_description()["costs"]
    cost["timing"] |= {"steps": 100}
    cost["peak"]["device"] = cost["peak"]["host"]
    copy.describe(device="cuda", costs=[cost | {"device": device}])
    return copy


def test_a_step_on_cores_is_measured_and_not_foreseen(run: Run) -> None:
    found = foreseen_run(run)
    assert found.step is None and found.step_why == OF_A_CPU and found.as_json()["states_error"] == 0


def test_a_gpus_step_is_foreseen_once_from_its_data_sheet(run: Run, tmp_path: Path, monkeypatch) -> None:
    copy = on_gpu(run, tmp_path)
    found = foreseen_run(copy)
    assert found.step is not None and found.as_json()["step_error"] is not None and not found.step_why
    assert found.step_measured == copy.read_description()["costs"][0]["timing"]["step"]["median"]
    assert found.as_json()["states_error"] == 0  # from the same trace
    content = json.loads((copy.folder / FILE).read_text())
    assert content["step"]["seconds"] == found.step
    monkeypatch.setattr(module, "_traced", untraced)
    assert foreseen_run(copy) == found
    (copy.folder / FILE).write_text(json.dumps({**content, "step": {}}))  # of a version without the data sheet
    assert "traced again" in foreseen_run(copy).why


def test_a_plan_whose_time_is_not_foreseen_keeps_its_memory(run: Run, tmp_path: Path) -> None:
    copy = on_gpu(run, tmp_path)
    copy.describe(plan="batchnorm=sync,threads=1")
    found = foreseen_run(copy)
    assert found.states == found.states_measured
    assert found.step is None and "batchnorm: its time is not foreseen" in found.step_why


def test_a_gpu_has_its_data_sheet_by_torchs_name_for_it() -> None:
    costs = [{"host": host, "device": A100} for host in ("one", "one", "two")]
    fabric, why = fabric_of({"device": "cuda", "costs": costs})
    assert fabric is not None and fabric.node == 2 and not why
    assert fabric.device.names == ("A100, 40 GB",)
    assert fabric_of({"device": "cuda", "costs": [{"device": "Voodoo 2"}]}) == (None, NO_DATA_SHEET)
    assert fabric_of({"device": "cuda", "costs": None}) == (None, NO_DATA_SHEET)


def test_no_two_data_sheets_are_of_the_same_name() -> None:
    names = [name for device in devices() for name in device.reported]
    assert len(names) == len(set(names)) >= len(devices())
