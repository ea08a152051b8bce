"""Plans that learn the same are tried in the order of what they cost, and the first that has room is found."""

from pathlib import Path

import pytest
import torch
from torch import nn

from grappe.errors import TaskError
from grappe.foresight import search
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import MemoryForecast
from grappe.foresight.memory import States
from grappe.foresight.search import MemoryBudget, candidates, fitting, foreseen
from grappe.plan import Plan
from grappe.tasks.volumes import Volumes
from tests.foresight.unusual import Rows
from tests.short_source import Short as Source

MB = 1_000_000


class Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.detach().sum())


class Looks(Rows):
    """A task whose last unit looks at values."""

    def model(self) -> nn.Module:
        return nn.Sequential(*super().model(), Reading())


@pytest.fixture(scope="module")
def fake_model() -> FakeModel:
    """38 million parameters: 610 MB of states, 640 with activations; a tenth is added."""
    return FakeModel(Source(), Path("data"))


def needing(peak: int | None) -> MemoryForecast:
    states = States(parameters=10**9, gradients=10**9, optimizer=2 * 10**9, buffers=0)
    return MemoryForecast(states=states, peak=peak, least=peak, rows=8, evaluation=peak, checkpoint=0, gpu=True)


def test_a_plan_fits_with_a_margin_and_an_unknown_peak_fits_never_for_sure() -> None:
    budget = MemoryBudget(whose="a GPU", size=20 * 10**9)
    assert budget.fits(needing(16 * 10**9))
    assert budget.fits(needing(17 * 10**9)) is False
    assert budget.fits(needing(None)) is None
    assert MemoryBudget(whose="a GPU", size=5 * 10**9).fits(needing(None)) is False


def test_plans_that_are_tried_train_the_same_and_begin_with_the_plainest() -> None:
    plans = [str(plan) for plan in candidates((1, 2))]
    assert plans[0] == "" and "replicate=2" in plans and "shard=2,microbatches=4,recompute" in plans
    assert plans.index("replicate=2") < plans.index("shard=2,zero=1") < plans.index("shard=2")


@pytest.mark.parametrize(
    ("plan", "limit", "found"),
    [
        ("", 760, "microbatches=4"),
        ("replicate=2", 700, "shard=2,zero=1"),
        ("", 600, "shard=2,zero=1"),
        ("replicate=2,precision=bf16", 500, "shard=2,precision=bf16"),
        ("", 250, "shard=4"),
        ("", 60, None),
    ],
)
def test_the_first_that_fits_is_found_on_more_processes_where_none_of_as_many_does(fake_model, plan, limit, found):
    other = fitting(fake_model, Plan.parse(plan), MemoryBudget(whose="", size=limit * MB, beyond=0, gpu=False))
    assert (other and other.plan) == found


def test_parts_of_samples_are_named_where_a_sample_alone_does_not_fit() -> None:
    alone = FakeModel(Volumes(size=16, width=4, batch_size=1, volumes=1), Path("data"))
    least = [foreseen(alone, Plan.parse(plan), 1, None).needs for plan in ("shard=4,recompute", "domain=4")]
    shards, parts = (each.peak for each in least if each is not None)
    budget = MemoryBudget(whose="", size=(shards + parts) / 2, beyond=0, gpu=False)
    named = fitting(alone, Plan(), budget)
    assert named.plan == "domain=4"


def test_memory_that_processes_share_is_divided_and_copies_count(fake_model: FakeModel) -> None:
    alone = MemoryBudget(whose="", size=1400 * MB, beyond=0, gpu=False)
    shared = MemoryBudget(whose="", size=1400 * MB, beyond=0, gpu=False, shared=True)
    plans = [fitting(fake_model, Plan.parse("replicate=2"), budget) for budget in (alone, shared)]
    assert [plan and plan.plan for plan in plans] == ["shard=2,zero=1", "shard=2"]


def test_what_no_plan_can_trace_ends_the_search_for_a_pipeline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, check = [], search.engines.check
    monkeypatch.setattr(search.engines, "check", lambda plan: (asked.append(plan), check(plan)))
    fake_model = FakeModel(Looks(), Path("data"))
    with pytest.raises(TaskError, match="cannot run without values"):
        fitting(fake_model, Plan.parse("pipeline=2,microbatches=2"), MemoryBudget(whose="", size=MB, gpu=False))
    assert len(asked) == 1


def test_a_search_that_takes_too_long_is_left(fake_model: FakeModel) -> None:
    with pytest.raises(TaskError, match="try grappe foresee"):
        fitting(fake_model, Plan(), MemoryBudget(whose="", size=1), seconds=-1)
