"""A study's folder: what is damaged is drawn again, what is another search is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from grappe.errors import RunError, UsageError
from grappe.verbs.tune.study import SearchDefinition, Trial, make_study, open_study

SEARCH = SearchDefinition(
    task="digits", fields={"epochs": 3}, fixed_fields={}, space={"lr": "0.1..1.0", "width": "1|2"}, plan="",
    metric="loss", maximize=False, sampler="random", seed=0, parallel=2, threads=1,
)  # fmt: skip
FIELDS = {"lr": "0.2", "width": "1"}


def test_records_are_read_again_and_the_best_is_the_first_of_equals(tmp_path: Path) -> None:
    study = make_study(tmp_path / "s", SEARCH)
    trials = [
        Trial(number=0, fields=FIELDS, state="failed", reason="no"),
        Trial(number=1, fields=FIELDS, state="complete", value=0.5, step=3, rungs=(0.5,)),
        Trial(number=2, fields=FIELDS, state="complete", value=0.5, step=3, rungs=(0.5,)),
        Trial(number=3, fields=FIELDS),
        Trial(number=4, fields=FIELDS, state="failed", rungs=(), reason="later"),
    ]
    for trial in trials:
        study.write(trial)
    assert open_study(tmp_path / "s").trials == trials
    assert study.best == trials[1]
    table = study.to_pandas()
    assert list(table["lr"]) == ["0.2"] * 5 and table["loss"][1] == 0.5 and table["reason"][0] == "no"
    assert "complete" in study._repr_html_()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"space": {"lr": "0.1..2.0", "width": "1|2"}}, "searches lr=0.1..1.0, and this command lr=0.1..2.0"),
        ({"space": {"lr": "0.1..1.0"}}, "searches width=1|2, and this command no width"),
        ({"fields": {"epochs": 4}}, "has epochs=3, and this command epochs=4"),
        ({"seed": 1}, "has --seed 0, and this command --seed 1"),
        ({"plan": "shard=2"}, "has no --plan, and this command --plan shard=2"),
        ({"maximize": True}, "has --minimize, and this command --maximize"),
        ({"task": "cifar10"}, "has the task digits, and this command the task cifar10"),
        ({"evaluate_every": 5}, "has no --evaluate-every, and this command --evaluate-every 5"),
    ],
)
def test_another_search_is_refused_by_name(tmp_path: Path, change: dict, told: str) -> None:
    make_study(tmp_path, SEARCH)
    make_study(tmp_path, dataclasses.replace(SEARCH, parallel=9, threads=7))  # the study's own are taken
    with pytest.raises(UsageError) as refused:
        make_study(tmp_path, dataclasses.replace(SEARCH, **change))
    assert told in str(refused.value)


def test_a_field_that_the_task_did_not_have_then_was_its_default(tmp_path: Path) -> None:
    make_study(tmp_path, SEARCH)
    more = dataclasses.replace(SEARCH, fields={"epochs": 3, "lr_scaling": "none"})
    assert make_study(tmp_path, more).search.fields == SEARCH.fields
    fields = {"fields": {"epochs": 3, "lr_scaling": "sqrt"}, "fixed_fields": {"lr_scaling": "sqrt"}}
    scaled = dataclasses.replace(SEARCH, **fields)
    with pytest.raises(UsageError, match="has no lr_scaling, and this command lr_scaling=sqrt"):
        make_study(tmp_path, scaled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"number": 0, "fie',
        "[]",
        '{"fields": {"lr": "0.2"}, "state": "open"}',
        '{"fields": {"lr": 0.2, "width": "1"}, "state": "open"}',
        '{"fields": {"lr": "0.2", "width": "1"}, "state": "complete", "value": NaN}',
        '{"fields": {"lr": "0.2", "width": "1"}, "state": "won", "value": 1}',
        '{"fields": {"lr": "0.2", "width": "1"}, "state": "paused", "rungs": [0.5]}',
        '{"fields": {"lr": "0.2", "width": "1"}, "state": "complete", "value": 1, "rungs": [NaN]}',
        '{"fields": {"lr": "0.2", "width": "1"}, "state": "complete", "value": true}',
    ],
)
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    study = make_study(tmp_path, SEARCH)
    (tmp_path / "trials" / "0000.json").write_text(text)
    assert study.read(0) is None
    assert study.trials == []


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a study"):
        open_study(tmp_path)
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunError, match=r"holds thesis.tex and is not a study"):
        make_study(tmp_path, SEARCH)
    (tmp_path / "study.json").write_text(json.dumps({"kind": "tune", "space": 3}))
    with pytest.raises(RunError, match="is damaged"):
        open_study(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"space": {"lr": 3}}, {"parallel": "2"}, {"sampler": "best"}, {"maximize": 1}, {"rungs": None}, {"more": 1}],
)
def test_a_study_of_wrong_types_is_damaged(tmp_path: Path, change: dict) -> None:
    make_study(tmp_path, SEARCH)
    found = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps({**found, **change}))
    with pytest.raises(RunError, match="is damaged"):
        open_study(tmp_path)


def test_a_study_of_before_there_was_halving_goes_on(tmp_path: Path) -> None:
    make_study(tmp_path, SEARCH)
    found = json.loads((tmp_path / "study.json").read_text())
    del found["halving"], found["rungs"]
    (tmp_path / "study.json").write_text(json.dumps(found))
    record = {"number": 0, "fields": FIELDS, "state": "complete", "value": 0.5, "step": 3, "reason": ""}
    (tmp_path / "trials" / "0000.json").write_text(json.dumps(record))
    [trial] = make_study(tmp_path, SEARCH).trials
    assert trial.rungs == (0.5,)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="give another with --study"):
        make_study(tmp_path / "file" / "s", SEARCH)
