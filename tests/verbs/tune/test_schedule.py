"""Tests that which trial is trained how far depends on results alone: not on the order in which they come."""

import dataclasses
import random
import sys

import pytest

from grappe.errors import UsageError
from grappe.verbs.tune.schedule import (
    STARTUP,
    RungJob,
    Schedule,
    check_sampler,
    draw,
    grid,
    has_result,
    rung_parts,
)
from grappe.verbs.tune.space import read_space
from grappe.verbs.tune.study import SearchDefinition, Trial
from tests.verbs.tune.line import Line
from tests.verbs.tune.test_study import SEARCH as STUDY

SEARCH = dataclasses.replace(STUDY, fields={}, space={"lr": "0.1..1.0"}, parallel=3)
HALVING = dataclasses.replace(SEARCH, halving=3, rungs=3)
SPACE, _ = read_space(Line, {"lr": "0.001..1:log", "width": "1..64", "batch_size": "8|16"})


def value(number: int, rung: int) -> float:
    """Rungs agree, but for chance that falls with the rung."""
    return (number * 7 % 27) / 27 + random.Random(f"{number}/{rung}").random() / 5 / (rung + 1)


class Played:
    """A study whose trainings end in an order of their own."""

    def __init__(
        self, search: SearchDefinition, total: int, *, seed: int = 0, failing: frozenset[int] = frozenset()
    ) -> None:
        self.search, self.trials, self.jobs, self.most = search, dict[int, Trial](), list[RungJob](), 0
        schedule, dice = Schedule(search, total=total, waits=True), random.Random(seed)
        running: list[RungJob] = []
        while True:
            for job in schedule.decided(self.trials.get):
                if job.number not in self.trials:
                    self.trials[job.number] = Trial(number=job.number, fields={"lr": "0.1"})
                self.jobs.append(job)
                running.append(job)
            self.most = max(self.most, len(running))
            if not running:
                break
            job = running.pop(dice.randrange(len(running)))
            trial = self.trials[job.number]
            self.trials[job.number] = (
                dataclasses.replace(trial, state="failed")
                if job.number in failing and job.rung == 1
                else self._trained(trial, job)
            )
        assert schedule.over

    def _trained(self, trial: Trial, job: RungJob) -> Trial:
        rungs, last = (*trial.rungs, value(job.number, job.rung)), job.rung + 1 == self.search.rungs
        state = "complete" if last else "paused"
        return dataclasses.replace(trial, state=state, rungs=rungs, value=rungs[-1] if last else None)

    @property
    def decided(self) -> list[tuple[int, int]]:
        return [(job.number, job.rung) for job in self.jobs]


@pytest.mark.parametrize("search", [SEARCH, HALVING, dataclasses.replace(HALVING, parallel=1)])
def test_the_order_of_ends_changes_nothing(search: SearchDefinition) -> None:
    first = Played(search, 27)
    for seed in range(1, 6):
        other = Played(search, 27, seed=seed)
        assert other.decided == first.decided
        assert [job.observed for job in other.jobs] == [job.observed for job in first.jobs]
        assert other.trials == first.trials
    assert first.most <= search.parallel


def test_without_halving_a_trial_knows_those_a_lag_before_it() -> None:
    jobs = Played(SEARCH, 8).jobs
    for job in jobs:
        known = [one.number for one in job.observed if one.state == "complete"]
        assert known == list(range(max(0, job.number - SEARCH.parallel + 1)))
        assert [one.number for one in job.observed] == list(range(job.number))


def test_of_three_one_goes_on() -> None:
    played = Played(HALVING, 27)
    reached = [sum(len(one.rungs) > rung for one in played.trials.values()) for rung in range(3)]
    assert reached[0] == 27
    assert 9 <= reached[1] <= 13  # at first some go on that later ones pass
    assert 3 <= reached[2] <= 5
    best = min(played.trials.values(), key=lambda one: value(one.number, 2))
    assert len(best.rungs) == 3
    cost = [float(part) for part in rung_parts(HALVING)]
    spent = sum(cost[len(one.rungs) - 1] for one in played.trials.values()) / 27
    assert spent < 0.35


def test_failures_count_in_their_rung_and_go_no_further() -> None:
    played = Played(HALVING, 27, failing=frozenset(range(0, 27, 2)))
    failed = [one for one in played.trials.values() if one.state == "failed"]
    assert failed
    assert all(len(one.rungs) == 1 for one in failed)


def test_more_trials_keep_what_the_first_have_come_to() -> None:
    before, after = Played(HALVING, 12), Played(HALVING, 27)
    assert before.decided[:8] == after.decided[:8]


def test_parts_and_results() -> None:
    assert [str(part) for part in rung_parts(HALVING)] == ["1/9", "1/3", "1"]
    assert [str(part) for part in rung_parts(SEARCH)] == ["1"]
    trial = Trial(number=0, fields={}, state="paused", rungs=(0.5,))
    assert has_result(trial, 0)
    assert not has_result(trial, 1)
    assert has_result(dataclasses.replace(trial, state="failed"), 1)


def objective(fields: dict[str, str]) -> float:
    return abs(float(fields["lr"]) - 0.1) + abs(int(fields["width"]) - 32) / 64


def drawn_by_tpe(lag: int, trials: int = 30) -> list[Trial]:
    search = dataclasses.replace(SEARCH, sampler="tpe", seed=3)
    told: list[Trial] = []
    for number in range(trials):
        known = max(0, number - lag + 1)
        fields = draw(search, SPACE, number, told[:known], told[known:])
        failed = number == 4
        told.append(Trial(number=number, fields=fields, value=None if failed else objective(fields)))
    return told


def test_tpe_draws_the_same_whoever_asks_and_learns() -> None:
    first = drawn_by_tpe(lag=4)
    assert drawn_by_tpe(lag=4) == first
    assert drawn_by_tpe(lag=1)[STARTUP + 5 :] != first[STARTUP + 5 :]
    early = sorted(objective(one.fields) for one in first[:STARTUP])
    late = sorted(objective(one.fields) for one in first[STARTUP:])
    assert late[len(late) // 2] < early[len(early) // 2]


def test_random_trials_do_not_depend_on_each_other() -> None:
    drawn = [draw(SEARCH, SPACE, number, (), ()) for number in range(200)]
    assert draw(dataclasses.replace(SEARCH, maximize=True), SPACE, 7, (), ()) == drawn[7]
    assert draw(dataclasses.replace(SEARCH, seed=1), SPACE, 7, (), ()) != drawn[7]
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
    check_sampler("random")
    check_sampler("grid")
    with pytest.raises(UsageError, match=r"pip install 'grappe\[tune\]', or take --sampler random"):
        check_sampler("tpe")
