"""An earlier run is taken for a training's time if it took the same steps, on such a device; the newest such run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grappe import sites
from grappe.contrib.slurm.jobs import record_job
from grappe.plan import Plan
from grappe.sites.layout import layout
from grappe.sites.sbatch import JobOptions
from grappe.tasks.digits import Digits
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.training.task_reference import field_texts, source_hash
from grappe.verbs.foresee import training_time
from grappe.words import processor_name

A100 = "NVIDIA A100-SXM4-40GB"
TASK = Digits(epochs=50)


def cost(**changes: Any) -> dict[str, Any]:
    timing = {
        "steps": 90,
        "step": {"median": 0.01},
        "means": {"forward": 0.008, "backward": 0.004},
        "totals": {"evaluation": 4.0, "checkpoint": 1.5, "start": 7.0},
    }
    return {"device": A100, "host": "one", "step": 100, "samples": 6400, "timing": timing, **changes}


def made(base: Path, name: str = "digits-1", **changes: Any) -> Run:
    """A run of 100 steps, with two evaluations."""
    return Run.begin(
        base / name,
        {
            "task": "digits",
            "class": "Digits",
            "source": source_hash(TASK),
            "fields": field_texts(Digits(epochs=3, seed=7)),
            "plan": "",
            "device": "cuda",
            "threads": 12,
            "start": {"steps_per_epoch": 50},
            "status": "finished",
            "costs": [cost()],
            **changes,
        },
    )[0]


def with_evaluations(run: Run, *steps: int) -> Run:
    lines = [json.dumps({"kind": "evaluation", "step": step}) for step in steps]
    (run.folder / "metrics.jsonl").write_text("\n".join(lines))
    return run


def query(site: str = "narval", plan: str = "", *, here: bool = False, **fields: Any) -> training_time.RunQuery:
    found, parsed = sites.find(site), Plan.parse(plan)
    placed = layout(parsed, found, JobOptions(account="def-me"))
    return training_time.RunQuery(task=Digits(epochs=50, **fields), plan=parsed, site=found, layout=placed, here=here)


def test_its_measured_costs(tmp_path: Path) -> None:
    run = with_evaluations(made(tmp_path), 50, 100)
    found = training_time.earlier_run(query(), tmp_path, None, Options())
    assert (
        found is not None
        and found.origin == f"as measured in the run {run.folder.name}"
        and found.steps_per_epoch == 50
    )
    assert found.step == pytest.approx(0.012)  # the mean, which is above the median
    assert (found.evaluation, found.save, found.start) == (2.0, 0.75, 7.0)


def test_evaluations_of_earlier_starts_are_not_counted_and_without_one_it_takes_half_an_epoch(tmp_path: Path) -> None:
    run = with_evaluations(made(tmp_path, costs=[cost(samples=3200)]), 50, 100)
    found = training_time.earlier_run(query(), tmp_path, None, Options())
    assert found is not None and found.evaluation == 4.0
    with_evaluations(run)
    found = training_time.earlier_run(query(), tmp_path, None, Options())
    assert found is not None and found.evaluation == pytest.approx(0.5 * 50 * 0.012)


@pytest.mark.parametrize(
    "changes",
    [
        {"class": "Other"},
        {"source": "another"},
        {"fields": field_texts(Digits(lr=0.5))},
        {"fields": None},
        {"plan": "precision=bf16"},
        {"plan": "no=plan"},
        {"device": "cpu"},
        {"costs": [cost(), cost()]},
        {"costs": [cost(device="Tesla V100-SXM2-16GB")]},
        {"costs": [cost(timing={"steps": 2, "step": {"median": 0.01}})]},
        {"costs": [cost(samples="many")]},
        {"costs": "many"},
        {"start": None},
        {"changes": ["restart 1 at step 4: plan: one process -> shard=2"], "status": "running"},
    ],
)
def test_a_run_of_other_steps_is_left(tmp_path: Path, changes: dict[str, Any]) -> None:
    made(tmp_path, **changes)
    assert training_time.earlier_run(query(), tmp_path, None, Options()) is None


def test_the_run_that_is_resumed_comes_first_then_the_newest(tmp_path: Path) -> None:
    for name in ("digits-1", "digits-2", "other-3"):
        made(tmp_path, name)
    Run(tmp_path / "other-3").describe(plan="shard=2")
    (tmp_path / "digits-2" / "run.json").write_text("{")
    first = training_time.earlier_run(query(), tmp_path, None, Options())
    assert first is not None and first.origin.endswith(" digits-1")
    resumed = made(tmp_path / "else", "mine")
    found = training_time.earlier_run(query(), tmp_path, resumed.folder, Options())
    assert found is not None and found.origin.endswith(" mine")
    assert training_time.earlier_run(query(), tmp_path / "none", tmp_path / "new", Options()) is None


def test_a_run_of_the_site_counts_whatever_its_gpu_is_called(tmp_path: Path) -> None:
    run = made(tmp_path, costs=[cost(device="NVIDIA A100-PG509")])
    assert training_time.earlier_run(query(), tmp_path, None, Options()) is None
    record_job(run.folder, "123", "narval", "")
    assert training_time.earlier_run(query(), tmp_path, None, Options()) is not None
    assert training_time.earlier_run(query("rorqual"), tmp_path, None, Options()) is None


@pytest.mark.parametrize(
    ("here", "processor", "threads", "site", "found"),
    [
        (True, processor_name(), 4, "", True),
        (False, processor_name(), 4, "", False),
        (True, "another", 4, "", False),
        (True, processor_name(), 2, "", False),
        (False, "another", 4, "narval-cpu", True),
        (False, "another", 2, "narval-cpu", False),
    ],
)
def test_cpus_are_of_the_site_or_of_this_machine_and_have_as_many_threads(
    tmp_path: Path, here: bool, processor: str, threads: int, site: str, found: bool
) -> None:
    run = made(tmp_path, device="cpu", processor=f"{processor}, AVX2", threads=threads, plan="threads=4")
    if site:
        record_job(run.folder, "123", site, "")
    asked = dataclasses.replace(query("narval-cpu", "device=cpu,threads=4"), here=here)
    assert (training_time.earlier_run(asked, tmp_path, None, Options()) is not None) == found


COSTS = training_time.TimeEstimate(
    step=0.5, evaluation=10.0, save=2.0, start=30.0, steps_per_epoch=100, origin="measured"
)


@pytest.mark.parametrize(
    ("options", "done", "steps", "evaluations", "saves"),
    [
        (Options(), 0, 1000, 10, 10),
        (Options(), 950, 50, 1, 1),
        (Options(evaluate_every=300, save_every=600), 0, 1000, 4, 2),
        (Options(steps=150), 0, 150, 2, 2),
        (Options(steps=150), 150, 0, 0, 0),
        (Options(steps=150), 400, 0, 0, 0),
        (Options(part=0.25), 0, 250, 3, 3),
        (Options(steps_only=True, steps=3000), 0, 3000, 0, 0),
    ],
)
def test_what_is_left(options: Options, done: int, steps: int, evaluations: int, saves: int) -> None:
    found = training_time.RemainingTraining.of(options, done=done, epochs=10, steps_per_epoch=100)
    assert (found.steps, found.evaluations, found.saves) == (steps, evaluations, saves)


def test_what_it_takes() -> None:
    remaining = training_time.RemainingTraining(steps=100, evaluations=3, saves=2)
    assert COSTS.seconds(remaining) == 30 + 50 + 30 + 4
    unsure = dataclasses.replace(COSTS, spread=0.5)
    assert unsure.seconds(remaining) == 2 * COSTS.seconds(remaining)  # half to twice


@given(done=st.integers(0, 900), more=st.integers(1, 99), every=st.integers(1, 400))
def test_what_is_done_is_not_left(done: int, more: int, every: int) -> None:
    options = Options(evaluate_every=every)
    a, b = (
        training_time.RemainingTraining.of(options, done=at, epochs=1, steps_per_epoch=1000)
        for at in (done, done + more)
    )
    assert a.steps - b.steps == more and a.evaluations >= b.evaluations
    assert COSTS.seconds(a) > COSTS.seconds(b)


@given(seconds=st.floats(0, 1e6), least=st.sampled_from([60, 300, 3600]), most=st.none() | st.integers(3600, 10**6))
def test_a_limit_is_enough_in_whole_units_and_never_above_the_sites(
    seconds: float, least: int, most: int | None
) -> None:
    found = training_time.time_limit(seconds, least, most)
    assert found >= least
    if found != most:
        assert found >= seconds * (1 + training_time.MARGIN) and found % 300 == 0
        assert found < seconds * (1 + training_time.MARGIN) + 3600 or found == least
    assert most is None or found <= most


@pytest.mark.parametrize(("minutes", "found"), [(0.1, 5), (41, 50), (99, 120), (101, 135), (595, 720), (610, 780)])
def test_units_grow_with_the_time(minutes: float, found: int) -> None:
    assert training_time.time_limit(60 * minutes, 60, None) == 60 * found


@pytest.mark.parametrize(
    ("costs", "found"),
    [
        ([cost(), cost(timing={"steps": 100, "step": {"median": 0.02}})], 0.02),
        ([cost(timing={"steps": 4, "step": {"median": 0.02}})], None),
        ([cost(timing={"steps": 100, "step": {"median": "NaN"}})], None),
        ([cost(timing={"steps": 100, "step": {"median": float("inf")}})], None),
        ([cost(timing=None)], None),
        ([{}], None),
        ([], None),
    ],
)
def test_the_median_step_of_the_slowest_process(costs: Any, found: float | None) -> None:
    assert training_time.median_step({"costs": costs}) == found
