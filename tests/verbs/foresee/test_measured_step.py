"""Steps of a plan are run on this machine's cores, if it has the cores and the memory for them."""

from pathlib import Path

import pytest

from grappe.errors import GrappeError, PlanError
from grappe.plan import Plan
from grappe.training.task_reference import TaskReference
from grappe.verbs.foresee import measured_step as module
from grappe.verbs.foresee.measured_step import STEPS, check_runs_here, measured_step
from tests.foresight.test_search import needing


@pytest.mark.parametrize("plan", ["threads=1", "replicate=2,threads=1"])
def test_a_few_steps_are_timed_and_nothing_stays(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = measured_step(TaskReference.of("digits"), Plan.parse(plan), Path("data"))
    assert found.measured and 0 < found.total < 10 and found.spread >= 0.1
    assert (found.communication > 0) == ("replicate" in plan)
    assert found.bubble == 0 and not list(tmp_path.iterdir())
    assert STEPS == 5


def test_a_training_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(GrappeError, match="nothing"):
        measured_step(TaskReference.of("digits", {"nothing": "1"}), Plan(), tmp_path)


def test_plans_that_do_not_fit_this_machine_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(module, "free_memory", lambda: 10_000_000)
    check_runs_here(Plan.parse("replicate=2,threads=1"), needing(3_000_000))
    with pytest.raises(PlanError, match="3 threads of 3 processes on 2 cores"):
        check_runs_here(Plan.parse("replicate=3,threads=1"), needing(1))
    with pytest.raises(PlanError, match=r"its steps are not run: they take 12 MB, and 10 MB are free here"):
        check_runs_here(Plan.parse("replicate=2,threads=1"), needing(6_000_000))
    with pytest.raises(PlanError, match="device=cuda"):
        check_runs_here(Plan.parse("device=cuda"), needing(1))
