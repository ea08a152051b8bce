"""A study's folder: its journal is read by whoever looks at it, what is another search is refused."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from grappe.contrib.tune.journal import FILE, Journal
from grappe.contrib.tune.space import SearchDefinition, Trial
from grappe.contrib.tune.study import Study, make_study, open_study
from grappe.errors import RunError, UsageError

SEARCH = SearchDefinition(
    task="digits", fields={"epochs": 3}, fixed_fields={}, space={"lr": "0.1..1.0", "width": "1|2"}, plan="",
    metric="loss", maximize=False, sampler="random", seed=0, parallel=2, threads=1,
)  # fmt: skip
FIELDS = {"lr": "0.2", "width": "1"}


def filled(study: Study, *trials: Trial) -> None:
    """Adds trials to a study's journal, as if they had been trained."""
    journal = Journal(study.folder, study.search)
    for trial in trials:
        journal._write(trial)


def test_trials_are_read_again_and_the_best_is_the_first_of_equals(tmp_path: Path) -> None:
    study = make_study(tmp_path / "s", SEARCH)
    trials = [
        Trial(number=0, fields=FIELDS, state="failed", reason="no"),
        Trial(number=1, fields=FIELDS, state="complete", value=0.5, step=3, rungs=(0.5,)),
        Trial(number=2, fields=FIELDS, state="complete", value=0.5, step=3, rungs=(0.5,)),
        Trial(number=3, fields=FIELDS),
        Trial(number=4, fields=FIELDS, state="failed", rungs=(), reason="later"),
    ]
    filled(study, *trials)
    assert open_study(tmp_path / "s").trials == trials
    assert study.best == trials[1]
    table = study.to_pandas()
    assert list(table["lr"]) == ["0.2"] * 5 and table["loss"][1] == 0.5 and table["reason"][0] == "no"
    assert "complete" in study._repr_html_()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"space": {"lr": "0.1..2.0", "width": "1|2"}}, "has lr=0.1..1.0, and this command lr=0.1..2.0"),
        ({"space": {"lr": "0.1..1.0"}}, "has width=1|2, and this command no width"),
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


def journal_of(folder: Path) -> Path:
    study = make_study(folder, SEARCH)
    filled(study, Trial(number=0, fields=FIELDS, state="complete", value=0.5, rungs=(0.5,)))
    return folder / FILE


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"number": 0', b'"number": 1'),
        (b'"number": 0', b'"number": -1'),
        (b'{"number"', b'{"number'),
        (b'"number"', b'"place"'),
        (b'"fields": {', b'"fields": [{'),
        (b'"lr": "0.2"', b'"lr": 0.2'),
        (b'"lr": "0.2"', b'"lr": "x"'),
        (b'"lr": "0.2"', b'"lr": "2"'),
        (b'"width": "1"', b'"width": "9"'),
        (b'"width": "1"', b'"widths": "1"'),
        (b'"complete"', b'"ready"'),
        (b'"complete"', b'"paused"'),
        (b'"value": 0.5', b'"value": 0.6'),
        (b'"rungs": [0.5]', b'"rungs": [NaN]'),
        (b'"rungs": [0.5]', b'"rungs": [true]'),
        (b'"rungs": [0.5]', b'"rungs": []'),
        (b'"rungs": [0.5]', b'"rungs": [0.4, 0.5]'),
        (b'"reason": ""', b'"reason": ["x"]'),
        (b'{"number"', b"[" * 100_000),
    ],
)
def test_a_damaged_journal_is_refused(tmp_path: Path, before: bytes, after: bytes) -> None:
    file = journal_of(tmp_path)
    content = file.read_bytes()
    assert before in content
    file.write_bytes(content.replace(before, after))
    with pytest.raises(RunError, match=r"trials.jsonl is damaged, or not of this version of grappe \("):
        print(open_study(tmp_path).trials)


def test_who_looks_at_a_study_writes_nothing(tmp_path: Path) -> None:
    study = make_study(tmp_path / "s", SEARCH)
    assert study.trials == [] and study.best is None
    assert [file.name for file in (tmp_path / "s").iterdir()] == ["study.json"]
    (tmp_path / "s" / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="is a link"):
        print(study.trials)
    (tmp_path / "s" / FILE).unlink()
    os.mkfifo(tmp_path / "s" / FILE)
    with pytest.raises(RunError, match="is not a file"):
        print(study.trials)


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
    [{"space": {"lr": 3}}, {"parallel": "2"}, {"sampler": "best"}, {"maximize": 1}, {"rungs": 1}, {"more": 1}],
)
def test_a_study_of_wrong_types_is_damaged(tmp_path: Path, change: dict) -> None:
    make_study(tmp_path, SEARCH)
    found = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps({**found, **change}))
    with pytest.raises(RunError, match="is damaged"):
        open_study(tmp_path)


@pytest.mark.parametrize("name", ["trials", "optuna.jsonl"])
def test_a_study_of_an_earlier_version_is_refused(name: str, tmp_path: Path) -> None:
    make_study(tmp_path, SEARCH)
    (tmp_path / name).mkdir()
    with pytest.raises(RunError, match="is a study of an earlier version of grappe: its runs stay as they are"):
        make_study(tmp_path, SEARCH)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="give another with --study"):
        make_study(tmp_path / "file" / "s", SEARCH)
