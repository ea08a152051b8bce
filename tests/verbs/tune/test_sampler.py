"""The fields of a trial depend on the seed, the space and what was told: on nothing else."""

from __future__ import annotations

import sys

import pytest

from grappe.errors import UsageError
from grappe.verbs.tune.sampler import STARTUP, check, draw, grid
from grappe.verbs.tune.space import read_space
from grappe.verbs.tune.study import Trial
from tests.verbs.tune.line import Line

SPACE, _ = read_space(Line, {"lr": "0.001..1:log", "width": "1..64", "batch_size": "8|16"})


def value(fields: dict[str, str]) -> float:
    return abs(float(fields["lr"]) - 0.1) + abs(int(fields["width"]) - 32) / 64


def played(lag: int, trials: int = 30) -> list[Trial]:
    told: list[Trial] = []
    for number in range(trials):
        known = max(0, number - lag + 1)
        fields = draw("tpe", SPACE, 3, number, told[:known], told[known:], maximize=False)
        failed = number == 4
        told.append(Trial(number=number, fields=fields, value=None if failed else value(fields)))
    return told


def test_tpe_draws_the_same_whoever_asks_and_learns() -> None:
    first = played(lag=4)
    assert played(lag=4) == first
    assert played(lag=1)[STARTUP + 5 :] != first[STARTUP + 5 :]
    early = sorted(value(one.fields) for one in first[:STARTUP])
    late = sorted(value(one.fields) for one in first[STARTUP:])
    assert late[len(late) // 2] < early[len(early) // 2]


def test_random_trials_do_not_depend_on_each_other() -> None:
    drawn = [draw("random", SPACE, 0, number, (), (), maximize=False) for number in range(200)]
    assert draw("random", SPACE, 0, 7, (), (), maximize=True) == drawn[7]
    assert draw("random", SPACE, 1, 7, (), (), maximize=False) != drawn[7]
    rates = sorted(float(one["lr"]) for one in drawn)
    assert 0.001 <= rates[0] < 0.002 and 0.5 < rates[-1] <= 1.0
    assert 0.015 < rates[100] < 0.07  # by ratio
    assert {one["batch_size"] for one in drawn} == {"8", "16"}


def test_a_grid_has_every_combination_and_wants_values() -> None:
    space, _ = read_space(Line, {"width": "1..3", "batch_size": "8|16"})
    assert [tuple(cell.values()) for cell in grid(space)] == [
        (width, batch) for width in ("1", "2", "3") for batch in ("8", "16")
    ]
    with pytest.raises(UsageError, match=r"for example 'lr=0.001\|0.01\|0.1\|1.0'"):
        grid(SPACE)


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    check("random")
    check("grid")
    with pytest.raises(UsageError, match=r"pip install 'grappe\[tune\]', or take --sampler random"):
        check("tpe")
