"""Tables, sentences and the file of grappe foresee."""

import dataclasses

import pytest

from grappe.foresight.gpu_time import StepTime
from grappe.foresight.search import Foreseen, MemoryBudget
from grappe.verbs.foresee import tables
from grappe.verbs.foresee.foresee import PlanTimes, TimedPlan, TrainingCost
from grappe.verbs.foresee.tables import answer, notes, shortlist
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


def without_time(text: str, peak: int | None, fits: bool | None = None) -> TimedPlan:
    return TimedPlan(foreseen=Foreseen(plan=text, processes=1, batch=8, needs=needing(peak), fits=fits))


def test_the_answer_is_a_plan_that_fits_or_what_to_change() -> None:
    budget = MemoryBudget(whose="a GPU", size=20 * 10**9)
    too_big = without_time("", 30 * 10**9, fits=False)
    times = PlanTimes(plans=(too_big, without_time("shard=2", 10 * 10**9, fits=True)), budget=budget)
    assert answer(times, "fastest") == ["Use shard=2: 12.5 GB of 20.0 GB a process"]
    assert "None of them fits" in answer(PlanTimes(plans=(too_big,), budget=budget), "fastest")[0]
    unknown = PlanTimes(plans=(too_big, without_time("pipeline=2", None)), budget=budget)
    assert "None of them fits" not in answer(unknown, "fastest")[0]


def test_a_small_training_needs_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grappe.verbs.foresee.tables.free_memory", lambda: 16 * 10**9)
    quick = PlanTimes(plans=(plan("", 0.01, 1, 10**6), plan("replicate=2", 0.005, 2, 10**6)))
    assert answer(quick, "fastest") == ["Everything fits; one process is enough: 1 MB a process, about 36 s (±15%)"]
    assert answer(PLANS, "fastest")[0].startswith("Use replicate=2: 2.0 GB a process, about 36 min (±15%)")
    monkeypatch.setattr("grappe.verbs.foresee.tables.free_memory", lambda: 10**6)
    assert answer(quick, "fastest")[0].startswith("Use replicate=2")


def test_at_most_five_plans_are_shown_of_which_none_is_worse_than_another() -> None:
    assert [timed.foreseen.plan for timed in shortlist(PLANS, "fastest")] == ["replicate=2", "shard=2", ""]
    small = [plan(f"replicate={count}", 1.0, count, 1000) for count in range(2, 9)]
    names = [timed.foreseen.plan for timed in shortlist(PlanTimes(plans=tuple(small)), "fastest")]
    assert names == ["replicate=2"], "equal rows are one"
    many = [plan(f"shard={count}", count / 10, count, 10**12 // count**2) for count in range(2, 20)]
    kept = shortlist(PlanTimes(plans=(*many, plan("", 1.0, 1, 10**12))), "cheapest")
    assert len(kept) == 5 and {"", "shard=19"} <= {timed.foreseen.plan for timed in kept}


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
    assert notes(PlanTimes(plans=(TimedPlan(foreseen=found),))) == [said]


def test_the_answer_says_how_many_others_may_be_as_good() -> None:
    close = dataclasses.replace(PLANS, plans=(plan("", 1.0, 1, 1), plan("replicate=2", 0.9, 2, 1)))
    assert answer(close, "fastest")[0].endswith("; 1 other plan may be as good: grappe measure")


def test_gpu_hours_and_core_hours_are_not_compared() -> None:
    cores = [plan("device=cpu", 2.0, 1, 1), plan("device=cpu,replicate=2", 1.5, 2, 1)]
    gpus = [
        dataclasses.replace(one, cost=dataclasses.replace(one.cost, on_gpus=True, kwh=0.1)) for one in PLANS.plans[:2]
    ]  # type: ignore[type-var]
    budget = MemoryBudget(whose="an A100", size=40 * 10**9)
    times = PlanTimes(plans=(*gpus, *cores), gpu="A100", budget=budget)
    assert [line.split(":")[0] for line in answer(times, "cheapest")] == ["Use one process", "Use device=cpu"]
    table = tables.table(times, times.plans)
    figures = {str(column.header): list(column.cells)[1:3] for column in table.columns}
    assert figures["GPU-hours"] == ["1.2", "-"] and figures["kWh at most"] == ["0.1", "-"]
    assert figures["core-hours"] == ["-", "2"] and "batch" not in figures
    parts = [column.header for column in tables.table(times, times.plans, tables.TIME_PARTS).columns]
    assert "compute" in parts and "communication" not in parts, "no plan communicates"


def test_the_smallest_is_named_with_its_memory_and_without_times() -> None:
    bare = PlanTimes(plans=tuple(TimedPlan(foreseen=one.foreseen) for one in PLANS.plans))
    assert answer(bare, "smallest") == ["Use shard=2: 1.0 GB a process"]
    assert answer(PLANS, "smallest")[0].startswith("Use shard=2: 1.0 GB a process, about")
    assert "step" not in [column.header for column in tables.table(bare, bare.plans).columns]


def test_the_plans_are_a_data_frame() -> None:
    pytest.importorskip("pandas")
    table = PLANS.to_pandas()
    assert list(table["plan"]) == ["one process", "replicate=2", "shard=2", "shard=4", "tensor=2"]
    assert table["memory"][1] == 2 * 10**9 and table["step"][1] == 0.6 and table["hours"][1] == 0.6
    assert table["why"][4] == "not foreseen"
    assert "shard=4" in PLANS._repr_html_()
