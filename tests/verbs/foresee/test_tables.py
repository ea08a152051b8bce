"""Tables, sentences and the file of grappe foresee."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from grappe.cli import measuring
from grappe.errors import UsageError
from grappe.foresight.gpu_time import StepTime
from grappe.foresight.search import Foreseen, MemoryBudget
from grappe.verbs.foresee import tables
from grappe.verbs.foresee.foresee import PlanTimes, TimedPlan, TrainingCost
from grappe.verbs.foresee.tables import memory_sentences, time_sentences
from tests.foresight.test_search import needing


def plan(text: str, seconds: float, processes: int, peak: int, fits: bool | None = None) -> TimedPlan:
    foreseen = Foreseen(plan=text, processes=processes, batch=64, needs=needing(peak), fits=fits)
    cost = TrainingCost(samples_per_second=64 / seconds, hours=seconds, unit_hours=seconds * processes)
    return TimedPlan(foreseen=foreseen, time=StepTime(compute=seconds, spread=0.15), cost=cost)


PLANS = PlanTimes(
    plans=(
        plan("", 1.0, 1, 3 * 10**9),
        plan("replicate=2", 0.6, 2, 2 * 10**9),
        plan("shard=2", 0.9, 2, 10**9),
        plan("shard=4", 0.1, 4, 10**9, fits=False),
        TimedPlan(foreseen=Foreseen(plan="tensor=2", processes=2, batch=64, needs=None), why="not foreseen"),
    )
)


def test_the_first_that_fits_is_named_or_what_to_change() -> None:
    budget = MemoryBudget(whose="a GPU", size=20 * 10**9)
    too_big = Foreseen(plan="", processes=1, batch=8, needs=needing(30 * 10**9), fits=False)
    fitting = Foreseen(plan="shard=2", processes=2, batch=8, needs=needing(10 * 10**9), fits=True)
    assert "the first that fits: shard=2" in memory_sentences([too_big, fitting], budget)[-1]
    assert "none of them fits" in memory_sentences([too_big], budget)[-1]
    unknown = Foreseen(plan="pipeline=2", processes=2, batch=8, needs=needing(None), fits=None)
    assert "none of them fits" not in memory_sentences([too_big, unknown], budget)[-1]


@pytest.mark.parametrize(
    ("plan", "why", "said"),
    [
        ("compile", "compile: not known", "compile: not known"),
        ("engine=x,shard=4", "engine=x: not known", "engine=x,shard=4: not known"),
        ("shard=4", "a pipeline: not known", "shard=4: a pipeline: not known"),
        ("", "not known", "one process: not known"),
    ],
)
def test_a_reason_begins_with_its_plan_once(plan: str, why: str, said: str) -> None:
    found = Foreseen(plan=plan, processes=1, batch=8, needs=None, why=why)
    assert memory_sentences([found], None) == [said]


def test_the_sentence_names_the_best_and_how_many_may_be_as_good() -> None:
    assert time_sentences(PLANS, "fastest")[-1] == "fastest: replicate=2, with 600.0 ms a step"
    close = dataclasses.replace(PLANS, plans=(plan("", 1.0, 1, 1), plan("replicate=2", 0.95, 2, 1)))
    assert "1 other plan may be as good" in time_sentences(close, "fastest")[-1]
    assert tables.time_table(PlanTimes(plans=PLANS.plans[-1:])) is None


def test_gpu_hours_and_core_hours_are_not_compared() -> None:
    cores = [plan("device=cpu", 2.0, 1, 1), plan("device=cpu,replicate=2", 1.5, 2, 1)]
    gpus = [dataclasses.replace(one, cost=dataclasses.replace(one.cost, kwh=0.1)) for one in PLANS.plans[:2]]  # type: ignore[type-var]
    times = PlanTimes(plans=(*gpus, *cores), gpu="A100")
    said = time_sentences(times, "cheapest")
    assert [line.partition(",")[0] for line in said] == ["cheapest: one process", "cheapest: device=cpu"]
    table = tables.time_table(times)
    assert table is not None
    figures = {str(column.header): list(column.cells)[1:3] for column in table.columns[-3:]}
    assert figures == {"GPU-hours": ["1.2", "-"], "kWh at most": ["0.1", "-"], "core-hours": ["-", "2"]}


def test_the_smallest_is_named_with_its_memory_and_without_times() -> None:
    bare = PlanTimes(plans=tuple(TimedPlan(foreseen=one.foreseen) for one in PLANS.plans))
    assert time_sentences(bare, "smallest") == ["smallest: shard=2, with 1.0 GB a process"]
    assert time_sentences(PLANS, "smallest") == time_sentences(bare, "smallest")
    assert time_sentences(bare, "fastest") == []


def test_all_of_it_is_written_as_json(tmp_path: Path) -> None:
    tables.write(PLANS, tmp_path / "a.json")
    read = json.loads((tmp_path / "a.json").read_text())
    assert [one["time"]["total"] for one in read["plans"][:2]] == [1.0, 0.6]
    with pytest.raises(UsageError, match="json"):
        tables.write(PLANS, tmp_path / "a.txt")


def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grappe.verbs.foresee.foresee.foresee", None)
    for out, why in ((tmp_path / "x.csv", r"\.json"), (tmp_path / "no" / "x.json", "No such file")):
        with pytest.raises(UsageError, match=why):
            measuring.foresee("digits", out=out)
