"""Fields of trials, and those that are trained further: a function of the seed and of the others' results."""

import dataclasses
import random
import sys
from pathlib import Path

import pytest

from grappe.contrib.tune.journal import FILE, STARTUP, Journal, grid
from grappe.contrib.tune.space import SearchDefinition, Trial, read_space
from grappe.contrib.tune.tune import tune
from grappe.errors import UsageError
from tests.contrib.tune.line import Line
from tests.contrib.tune.test_study import SEARCH as STUDY

SPACE, _ = read_space(Line, {"lr": "0.001..1:log", "width": "1..64", "batch_size": "8|16"})
SEARCH = dataclasses.replace(STUDY, fields={}, space={name: str(axis) for name, axis in SPACE.items()})
HALVING = dataclasses.replace(SEARCH, halving=3, rungs=3)


def objective(trial: Trial) -> float:
    return abs(float(trial.fields.get("lr", 0)) - 0.1) + abs(int(trial.fields["width"]) - 32) / 64


def played(folder: Path, search: SearchDefinition, total: int, *, failing: int = -1) -> list[Trial]:
    """Plays a study, one trial at a time, whose coordinator is killed after each operation."""

    folder.mkdir(exist_ok=True)
    while (journal := Journal(folder, search)).open or len(journal.trials) < total:
        number = next(iter(journal.open), None)
        if number is None:
            number = journal.ask()
        elif number == failing:
            journal.fail(number, reason="bad luck")
        else:
            trial = journal.trials[number]
            chance = random.Random(f"{number}/{len(trial.rungs)}").random() / 5 / (len(trial.rungs) + 1)
            journal.report(number, objective(trial) + chance, 9)
    return journal.trials


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_seed_repeats_one_at_a_time_through_kills(sampler: str, tmp_path: Path) -> None:
    search = dataclasses.replace(SEARCH, sampler=sampler, seed=3)
    first = played(tmp_path, search, 20, failing=4)
    (journal := tmp_path / "whole").mkdir()
    whole = Journal(journal, search)
    for number in range(20):
        assert whole.ask() == number
        if number == 4:
            whole.fail(number, reason="bad luck")
        else:
            whole.report(number, first[number].value or 0.0, 9)
    assert whole.trials == first
    assert first[4].state == "failed" and first[4].reason == "bad luck"
    assert len({trial.fields["lr"] for trial in first}) == 20


def test_tpe_learns(tmp_path: Path) -> None:
    trials = played(tmp_path, dataclasses.replace(SEARCH, sampler="tpe", seed=3), 30)
    early, late = sorted(map(objective, trials[:STARTUP])), sorted(map(objective, trials[STARTUP:]))
    assert late[len(late) // 2] < early[len(early) // 2]


def test_random_trials_fill_the_space(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SEARCH)
    for _ in range(100):
        journal.ask()
    drawn = [trial.fields for trial in journal.trials]
    rates = sorted(float(one["lr"]) for one in drawn)
    assert 0.001 <= rates[0] < 0.003 and 0.4 < rates[-1] <= 1.0
    assert 0.01 < rates[50] < 0.1  # by ratio
    assert {one["batch_size"] for one in drawn} == {"8", "16"}


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_no_combination_is_tried_twice_while_another_is_untried(sampler: str, tmp_path: Path) -> None:
    space = {"lr": "0.1|0.2|0.3", "width": "1..4:log"}
    search = dataclasses.replace(SEARCH, sampler=sampler, space=space)
    trials = played(tmp_path, search, 14)
    assert len({(trial.fields["lr"], trial.fields["width"]) for trial in trials[:12]}) == 12
    assert all(trial.fields["lr"] in ("0.1", "0.2", "0.3") for trial in trials[12:]), "then values come again"


def test_of_three_one_goes_on(tmp_path: Path) -> None:
    trials = played(tmp_path, HALVING, 27, failing=5)
    reached = [sum(len(one.rungs) > rung for one in trials) for rung in range(3)]
    assert reached[0] == 26
    assert 6 <= reached[1] <= 16  # at first some go on that later ones pass
    assert 2 <= reached[2] <= 8
    assert len(trials[0].rungs) == 3, "the first has nobody to be compared with"
    for trial in trials:
        assert trial.state == {0: "failed", 3: "complete"}.get(len(trial.rungs), "paused")
    assert [str(part) for part in HALVING.parts] == ["1/9", "1/3", "1"]
    assert [str(part) for part in SEARCH.parts] == ["1"]


def test_a_grid_has_every_combination_and_wants_values(tmp_path: Path) -> None:
    space, _ = read_space(Line, {"width": "1..3", "batch_size": "8|16"})
    cells = [{"width": width, "batch_size": batch} for width in ("1", "2", "3") for batch in ("8", "16")]
    assert grid(space) == cells
    search = dataclasses.replace(SEARCH, sampler="grid", space={name: str(axis) for name, axis in space.items()})
    assert [trial.fields for trial in played(tmp_path, search, 6)] == cells
    with pytest.raises(UsageError, match=r"for example lr=0.001,1.0;"):
        grid(SPACE)


def test_a_trial_whose_last_line_is_removed_is_open_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SEARCH)
    journal.fail(journal.ask(), reason="bad luck")
    failed = journal.trials[0]
    first, _ = (tmp_path / FILE).read_text().splitlines(keepends=True)
    (tmp_path / FILE).write_text(first)
    assert Journal(tmp_path, SEARCH).trials == [dataclasses.replace(failed, state="open", reason="")]


def test_a_journal_cut_anywhere_goes_on(tmp_path: Path) -> None:
    """As a power cut leaves it: the operations whose lines are complete are there, and none is lost after that."""
    whole = played(tmp_path / "whole", HALVING, 6, failing=2)
    content = (tmp_path / "whole" / FILE).read_bytes()
    (tmp_path / "cut").mkdir()
    for size in range(0, len(content), 41):
        (tmp_path / "cut" / FILE).write_bytes(content[:size])
        assert played(tmp_path / "cut", HALVING, 6, failing=2) == whole
        assert (tmp_path / "cut" / FILE).read_bytes() == content


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"a search needs Optuna: pip install 'grappe\[tune\]'"):
        tune(Line(), {"lr": "0.01..1"}, study=tmp_path / "s")
    assert not (tmp_path / "s").exists()
