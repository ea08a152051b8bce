"""An earlier run is taken for a training's time if it took the same steps, on such a device; the newest such run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from grappe import sites
from grappe.checkpoint.format import step_folder
from grappe.foresight.calibration import Machine
from grappe.plan import Plan
from grappe.sites.layout import ResourceRequest, layout
from grappe.tasks.digits import Digits
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.training.task_reference import field_texts, source_hash
from grappe.verbs.foresee.earlier import Wanted, earlier, steps_done
from grappe.verbs.submit.jobs import record_job

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
    return Run.create(
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
    )


def with_evaluations(run: Run, *steps: int) -> Run:
    lines = [json.dumps({"kind": "evaluation", "step": step}) for step in steps]
    (run.folder / "metrics.jsonl").write_text("\n".join(lines))
    return run


def wanted(site: str = "narval", plan: str = "", *, here: bool = False, **fields: Any) -> Wanted:
    found, parsed = sites.find(site), Plan.parse(plan)
    placed = layout(parsed, found, ResourceRequest(account="def-me"))
    return Wanted(task=Digits(epochs=50, **fields), plan=parsed, site=found, layout=placed, here=here)


def test_its_measured_costs(tmp_path: Path) -> None:
    run = with_evaluations(made(tmp_path), 50, 100)
    found = earlier(wanted(), tmp_path, None, Options())
    assert found is not None and found.folder == run.folder and found.steps_per_epoch == 50
    assert found.costs.step == pytest.approx(0.012)  # the mean, which is above the median
    assert (found.costs.evaluation, found.costs.save, found.costs.start) == (2.0, 0.75, 7.0)


def test_evaluations_of_earlier_starts_are_not_counted_and_without_one_it_takes_half_an_epoch(
    tmp_path: Path,
) -> None:
    run = with_evaluations(made(tmp_path, costs=[cost(samples=3200)]), 50, 100)
    found = earlier(wanted(), tmp_path, None, Options())
    assert found is not None and found.costs.evaluation == 4.0
    with_evaluations(run)
    found = earlier(wanted(), tmp_path, None, Options())
    assert found is not None and found.costs.evaluation == pytest.approx(0.5 * 50 * 0.012)


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
    assert earlier(wanted(), tmp_path, None, Options()) is None


def test_the_run_that_is_resumed_comes_first_then_the_newest(tmp_path: Path) -> None:
    for name in ("digits-1", "digits-2", "other-3"):
        made(tmp_path, name)
    Run(tmp_path / "other-3").describe(plan="shard=2")
    (tmp_path / "digits-2" / "run.json").write_text("{")
    first = earlier(wanted(), tmp_path, None, Options())
    assert first is not None and first.folder.name == "digits-1"
    resumed = made(tmp_path / "else", "mine")
    found = earlier(wanted(), tmp_path, resumed.folder, Options())
    assert found is not None and found.folder == resumed.folder
    assert earlier(wanted(), tmp_path / "none", tmp_path / "new", Options()) is None


def test_a_run_of_the_site_counts_whatever_its_gpu_is_called(tmp_path: Path) -> None:
    run = made(tmp_path, costs=[cost(device="NVIDIA A100-PG509")])
    assert earlier(wanted(), tmp_path, None, Options()) is None
    record_job(run.folder, "123", "narval", "")
    assert earlier(wanted(), tmp_path, None, Options()) is not None
    assert earlier(wanted("rorqual"), tmp_path, None, Options()) is None


@pytest.mark.parametrize(
    ("here", "processor", "threads", "site", "found"),
    [
        (True, Machine.here().processor, 4, "", True),
        (False, Machine.here().processor, 4, "", False),
        (True, "another", 4, "", False),
        (True, Machine.here().processor, 2, "", False),
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
    asked = dataclasses.replace(wanted("narval-cpu", "device=cpu,threads=4"), here=here)
    assert (earlier(asked, tmp_path, None, Options()) is not None) == found


def test_steps_done_are_those_of_the_newest_checkpoint(tmp_path: Path) -> None:
    assert steps_done(None) == steps_done(tmp_path / "none") == 0
    run = made(tmp_path)
    assert steps_done(run.folder) == 0
    for step in (20, 60):
        folder = step_folder(run.checkpoints, step)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    assert steps_done(run.folder) == 60
