"""Tests that which trial is trained how far depends on results alone: not on the order in which they come."""

from __future__ import annotations

import dataclasses
import random

import pytest

from grappe.verbs.tune.schedule import RungJob, Schedule, fewest_trials, has_result, parts
from grappe.verbs.tune.study import SearchDefinition, Trial

SEARCH = SearchDefinition(
    task="digits", fields={}, fixed_fields={}, space={"lr": "0.1..1.0"}, plan="", metric="loss", maximize=False,
    sampler="random", seed=0, parallel=3, threads=1,
)  # fmt: skip
HALVING = dataclasses.replace(SEARCH, halving=3, rungs=3)


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
    cost = [float(part) for part in parts(HALVING)]
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
    assert [str(part) for part in parts(HALVING)] == ["1/9", "1/3", "1"]
    assert [str(part) for part in parts(SEARCH)] == ["1"]
    assert fewest_trials(3, 3) == 9
    trial = Trial(number=0, fields={}, state="paused", rungs=(0.5,))
    assert has_result(trial, 0)
    assert not has_result(trial, 1)
    assert has_result(dataclasses.replace(trial, state="failed"), 1)
