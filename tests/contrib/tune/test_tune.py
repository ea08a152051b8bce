"""Studies from Python: trials are ordinary runs, failures are rows, and a study goes on from what is on disk."""

import json
from pathlib import Path

import pytest

import grappe
from grappe.checkpoint.lease import Lease
from grappe.contrib.tune.study import Study
from grappe.errors import RunError
from grappe.training.run import Run
from grappe.verbs.evaluate import evaluate
from tests.contrib.tune.line import Line


def rows(study: Study) -> list[tuple]:
    return [(one.number, one.fields, one.state, one.value) for one in study.trials]


def searched(folder: Path, trials: int = 4, parallel: int = 2, **others) -> Study:
    space = {"lr": "0.01..1:log", "width": [1, 2, 3]}
    return grappe.tune(Line(), space, trials=trials, parallel=parallel, study=folder, **others)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return searched(tmp_path_factory.mktemp("study") / "whole", trials=5)


def test_trials_are_ordinary_runs(whole: Study) -> None:
    assert [one.state for one in whole.trials] == ["complete"] * 5
    best = whole.best
    assert best.value == min(one.value for one in whole.trials if one.value is not None)
    run = Run(whole.run_folder(best.number))
    assert run.is_finished()
    assert run.read_description()["fields"]["lr"] == float(best.fields["lr"])
    task = Line(lr=float(best.fields["lr"]), width=int(best.fields["width"]))
    assert evaluate(run, task=task).loss == pytest.approx(best.value, rel=1e-6)


def test_a_study_goes_on_with_more_trials_and_less_at_a_time(whole: Study, tmp_path: Path) -> None:
    first = searched(tmp_path / "s", trials=3)
    assert rows(first) == rows(whole)[:3]
    with (first.run_folder(2) / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"kind": "evaluation", "st')  # half a line
    journal = tmp_path / "s" / "trials.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])  # what the last trial came to is half written
    assert [one.state for one in first.trials] == ["complete", "complete", "open"]
    assert rows(searched(tmp_path / "s", trials=5, parallel=1)) == rows(whole)


@pytest.mark.slow
def test_failures_are_rows_with_their_reason(tmp_path: Path) -> None:
    space = {"how": ["well", "nan", "memory", "broken", "killed"], "width": [1, 13]}
    study = grappe.tune(Line(epochs=1), space, parallel=2, sampler="grid", study=tmp_path / "s")
    found = {(one.fields["how"], one.fields["width"]): one for one in study.trials}
    assert len(found) == 10
    assert study.best == found["well", "1"]
    assert "width=13 brings bad luck" in found["well", "13"].reason
    for how, told in (
        ("nan", "DivergedError: the loss is nan"),
        ("memory", "OutOfMemory"),
        ("broken", "KeyError"),
        ("killed", "it was killed (by SIGKILL, as the system does when memory runs out) 5 times"),
    ):
        assert found[how, "1"].state == "failed"
        assert told in found[how, "1"].reason
    before = rows(study)
    grappe.tune(Line(epochs=1), space, parallel=2, sampler="grid", study=tmp_path / "s")
    assert rows(study) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "much"])
def test_an_objective_that_is_no_number_is_a_reason(whole: Study, value: object) -> None:
    from grappe.contrib.tune.coordinator import result_of

    trial = whole.trials[0]
    metrics = whole.run_folder(0) / "metrics.jsonl"
    before = metrics.read_bytes()
    try:
        last = {"kind": "evaluation", "step": trial.step, "loss": value}
        metrics.write_bytes(before + json.dumps(last).encode() + b"\n")
        assert str(result_of(whole, trial)).startswith("loss is ")
        metrics.write_bytes(b'{"kind": "evalua')
        assert "no readable evaluation of the last step" in str(result_of(whole, trial))
    finally:
        metrics.write_bytes(before)


def test_a_second_coordinator_is_refused(whole: Study) -> None:
    lease = Lease(whole.folder)
    lease.take()
    try:
        with pytest.raises(RunError, match="is being written by process"):
            searched(whole.folder, trials=6)
    finally:
        lease.release()


def test_a_run_of_another_study_is_refused(whole: Study, tmp_path: Path) -> None:
    other = searched(tmp_path / "s", trials=1, parallel=1)
    other.run_folder(0).rename(tmp_path / "s" / "trial-0001")
    with pytest.raises(RunError, match=r"trial-0001 was trained with (lr|width)="):
        searched(tmp_path / "s", trials=2, parallel=1)
