"""Successive halving: stopped at a checkpoint, resumed from it, and no step is made twice."""

from pathlib import Path

import pytest

import grappe
from grappe.contrib.tune.coordinator import result_of
from grappe.contrib.tune.study import Study
from grappe.errors import UsageError
from grappe.training.options import Options
from grappe.training.run import Run
from tests.contrib.tune.line import Line

SPACE = {"lr": "0.01..1:log", "width": [1, 2, 3]}


def searched(folder: Path, **others) -> Study:
    return grappe.tune(Line(epochs=8), SPACE, trials=4, sampler="random", study=folder, **others)


def losses(study: Study, number: int) -> list[tuple]:
    return [(one["step"], one["loss"], one["lr"]) for one in Run(study.run_folder(number)).records("step")]


@pytest.mark.slow
def test_what_goes_on_is_what_a_whole_training_is(tmp_path: Path) -> None:
    whole, halved = searched(tmp_path / "whole"), searched(tmp_path / "halved", halving=2)
    assert [one.fields for one in halved.trials] == [one.fields for one in whole.trials]
    reached = {one.number: len(one.rungs) for one in halved.trials}
    assert reached[0] == 3 and min(reached.values()) == 1  # the first has nobody to be compared with
    for number, rungs in reached.items():
        steps = (4, 8, 16)[rungs - 1]
        assert losses(halved, number) == losses(whole, number)[:steps]
        run = Run(halved.run_folder(number)).read_description()
        assert run["used"]["samples"] == steps * 8  # no sample was trained on again
        assert run["restarts"] == rungs - 1
        assert run["step"] == steps
        evaluated = {one["step"]: one["loss"] for one in Run(whole.run_folder(number)).records("evaluation")}
        assert halved.trials[number].rungs == tuple(evaluated[at] for at in (4, 8, 16)[:rungs])
    best, trials = halved.best, halved.trials
    assert best.value == whole.trials[best.number].value

    # The runs have the results that the journal has lost: nothing is trained again.
    journal = tmp_path / "halved" / "trials.jsonl"
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    assert [one.state for one in halved.trials] == ["open"]
    assert searched(tmp_path / "halved", halving=2).trials == trials
    for number, rungs in reached.items():
        assert Run(halved.run_folder(number)).read_description()["restarts"] == rungs - 1


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"halving": 1}, "--halving=1: it must be at least 2"),
        ({"halving": 3, "rungs": 10_000}, "--rungs: at most 20"),
        ({"rungs": 2}, "give --halving 3 as well"),
        ({"halving": 2, "options": Options(patience=2)}, "--patience with --halving"),
        ({"halving": 2, "options": Options(part=0.5)}, "--part stops each training early"),
    ],
)
def test_wrong_use(others: dict, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        searched(tmp_path / "s", **others)
    assert told in str(refused.value)
    assert not (tmp_path / "s").exists()


def test_another_halving_is_another_study(tmp_path: Path) -> None:
    halved = searched(tmp_path / "s", halving=2, options=Options(steps=4))
    with pytest.raises(UsageError, match="has --halving 2, and this command no --halving"):
        searched(tmp_path / "s", options=Options(steps=4))

    # What ended at a rung is not taken for a later one.
    paused = next(one for one in halved.trials if one.state == "paused")
    part, there = (paused.step or 0) / 4, (paused.rungs[-1], paused.step)
    assert result_of(halved, paused, 1.0) is None
    assert result_of(halved, paused, part) == there

    # Somebody trains it further: what counts is what it was at the rung, or at the last evaluation before.
    Run(halved.run_folder(paused.number)).describe(step=4, status="paused")
    assert result_of(halved, paused, part) == there
    assert result_of(halved, paused, 0.75) == there
    assert "no readable evaluation of the last step, 4" in str(result_of(halved, paused, 1.0))
