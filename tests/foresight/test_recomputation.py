"""Recomputation that fits is chosen at little time: against all levels of units, and by its own trace."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from grappe.errors import PlanError
from grappe.foresight.devices import REFERENCE, device_named
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import memory_forecast
from grappe.foresight.kernels import Kernels
from grappe.foresight.recomputation import Recomputation, Units, fitted
from grappe.plan import Plan
from grappe.tasks.digits import Digits
from grappe.tasks.pysource import PySource

BATCH = 8
ARITHMETIC = device_named(REFERENCE)
"""A device whose kernels' times are computed: measured ones differ between equal blocks on a busy machine."""


@pytest.fixture(scope="module")
def gpt() -> FakeModel:
    """Two blocks between the embeddings and the head: four units."""
    task = PySource(width=64, depth=2, heads=2, batch_size=BATCH, megabytes=0.3)
    return FakeModel(task, Path("data"), kernels=Kernels(scratch=False), records=True)


@pytest.fixture(scope="module")
def units(gpt: FakeModel) -> Units:
    return Units(gpt, Plan(), BATCH, ARITHMETIC, gpu=False)


def peak(gpt: FakeModel, plan: Plan) -> int:
    return memory_forecast(gpt, plan, batch=BATCH).peak


@pytest.fixture(scope="module")
def pipelined(gpt: FakeModel) -> Units:
    return Units(gpt, Plan.parse("pipeline=2,microbatches=4"), BATCH, ARITHMETIC, gpu=False)


@pytest.fixture(scope="module")
def interleaved(gpt: FakeModel) -> Units:
    plan = Plan.parse("pipeline=2,microbatches=4,schedule=interleaved,stages=2")
    return Units(gpt, plan, BATCH, ARITHMETIC, gpu=False)


def fits(limit: int) -> Callable[[Recomputation], bool]:
    return lambda choice: choice.peak <= limit


@pytest.mark.parametrize("of", ["units", "pipelined", "interleaved"])
def test_a_choice_fits_and_takes_little_more_time_than_the_best_of_all(request: pytest.FixtureRequest, of: str) -> None:
    """Compares with every choice of levels of both blocks; the embeddings and the head keep next to nothing."""
    units, parts = request.getfixturevalue(of), (0.2, 0.5, 0.8) if of == "units" else (0.5,)
    assert units.number == 4
    levels = units.levels if of == "units" else ("", "full")
    every = [units.choice(["", *of_blocks, ""]) for of_blocks in itertools.product(levels, repeat=2)]
    least, most = (units.choice([level] * 4).peak for level in ("full", ""))
    for part in parts:
        limit = int(least + part * (most - least))
        chosen = units.cheapest(limit, fits(limit))
        assert chosen.peak <= limit
        # Units go in the order of seconds a byte, which is not the best of all choices.
        assert 1 + chosen.price <= 1.05 * (1 + min(choice.price for choice in every if choice.peak <= limit))


def test_half_of_the_saving_is_cheap_and_more_than_all_cuts_microbatches(units: Units, gpt: FakeModel) -> None:
    every, most = (units.choice([level] * 4) for level in ("full", ""))
    limit = (every.peak + most.peak) // 2
    # One of two equal blocks; and the head, which takes next to no time and frees next to no bytes.
    assert fitted(gpt, Plan(memory="1MB"), BATCH, limit, ARITHMETIC).price <= 0.55 * every.price
    assert fitted(gpt, Plan(memory="1MB"), BATCH, int(0.9 * every.peak)).plan.microbatches > 1


def test_what_fits_as_it_is_recomputes_nothing_and_what_cannot_fit_says_by_how_much(gpt: FakeModel) -> None:
    assert fitted(gpt, Plan(memory="9GB"), BATCH, 9 * 10**9).plan == Plan()
    with pytest.raises(PlanError, match=r"memory=1MB: torch may allocate 1 MB .* the least .* \d MB more"):
        fitted(gpt, Plan(memory="1MB"), BATCH, 10**6)


def test_statistics_of_a_microbatch_are_not_changed() -> None:
    digits = FakeModel(Digits(), Path("data"), kernels=Kernels(scratch=False), records=True)
    with pytest.raises(PlanError, match="memory=1MB"):
        fitted(digits, Plan(memory="1MB"), 64, 10**6)


@pytest.mark.parametrize(
    "plan", ["replicate=2", "shard=2", "shard=2,zero=1,microbatches=2", "pipeline=2,replicate=2,microbatches=2"]
)
def test_a_choice_fits_under_plans_of_several_processes(gpt: FakeModel, plan: str) -> None:
    asked = Plan.parse(plan)
    least, most = (peak(gpt, Plan.parse(f"{plan},recompute=full" if level else plan)) for level in ("full", ""))
    limit = (least + most) // 2
    chosen = fitted(gpt, asked, BATCH, limit, ARITHMETIC)
    assert 0.85 * limit < chosen.peak <= limit and 0 < chosen.price < 0.3


def test_python_is_in_the_time_of_the_step_that_a_price_is_a_part_of(gpt, monkeypatch):
    monkeypatch.setattr("grappe.foresight.recomputation.seconds_an_operator", lambda level: 1.0)
    # In the thousands without the step's own. Up to 0.07 on torch 2.8, whose checkpoints detach twice as often.
    assert Units(gpt, Plan(), BATCH, None, gpu=False).price(["full"] * 4) < 0.1


@pytest.fixture(scope="module")
def deep() -> FakeModel:
    """Most of whose memory is parameters and their states, as a GPU has them."""
    task = PySource(width=64, depth=6, heads=2, batch_size=BATCH, megabytes=0.3)
    return FakeModel(task, Path("data"), foreach=True, records=True)


@pytest.mark.parametrize("plan", ["", "shard=2", "pipeline=2,microbatches=4"])
def test_activations_go_to_the_host_where_copies_are_quick(plan: str) -> None:
    asked, samples = Plan.parse(plan), 64
    task = PySource(width=256, depth=2, heads=2, batch_size=samples, megabytes=0.3)
    wide = FakeModel(task, Path("data"), foreach=True, records=True)
    quick, slow = (Units(wide, asked, samples, None, gpu=True, rate=rate) for rate in (1e13, 1e7))
    least, most = (quick.choice([level] * 4).peak for level in ("full", ""))
    limit = (least + most) // 2
    chosen, other = (units.cheapest(limit, fits(limit)) for units in (quick, slow))
    assert "host" in str(chosen.plan.recompute) and chosen.needs.host > 0
    assert "host" not in str(other.plan.recompute)


def test_activations_go_to_a_host_that_has_room_for_them(deep: FakeModel) -> None:
    needs = memory_forecast(deep, Plan(recompute="host"), batch=BATCH, gpu=True)
    asked = Plan(memory="1MB")
    chosen = fitted(deep, asked, BATCH, needs.peak, gpu=True, rate=1e9, host=needs.host)
    assert "host" in str(chosen.plan.recompute) and chosen.computing.endswith(" of activations on the host")
    assert fitted(deep, asked, BATCH, needs.peak, gpu=True, rate=1e9, host=needs.host - 1).plan.microbatches > 1


def test_what_fits_in_no_other_way_has_its_states_on_the_host_of_a_gpu(deep: FakeModel) -> None:
    states = memory_forecast(deep, Plan(), batch=BATCH, gpu=True).states.total
    chosen = fitted(deep, Plan(memory="1MB"), BATCH, states, gpu=True, host=states)
    assert chosen.plan.offload == "cpu" and chosen.peak <= states
    with pytest.raises(PlanError, match="memory=1MB"):
        fitted(deep, Plan(memory="1MB"), BATCH, states, gpu=True, host=states - 1)
    room = 2 * states + memory_forecast(deep, Plan(recompute=True), batch=BATCH, gpu=True).peak
    assert fitted(deep, Plan(memory="1MB"), BATCH, room, gpu=True, host=states).plan.offload == "none"


def test_a_gpu_holds_the_units_of_a_moment_of_a_plan_with_offload(deep: FakeModel) -> None:
    """Bounds it by what no GPU was measured for, so that `foresee` does not show it."""
    assert memory_forecast(deep, Plan(offload="cpu"), batch=BATCH, gpu=True).peak is None
    needs = memory_forecast(deep, Plan(offload="cpu", recompute=True), batch=BATCH, gpu=True, bounded=True)
    inside = memory_forecast(deep, Plan(recompute=True), batch=BATCH, gpu=True)
    assert needs.peak < inside.peak - needs.states.optimizer


def test_the_price_of_short_steps_on_cores_is_not_named(gpt: FakeModel) -> None:
    chosen = fitted(gpt, Plan(threads=1), BATCH, peak(gpt, Plan(threads=1)) - 1)
    assert chosen.computing == "more computing (steps are too short to foresee how much)"
    assert dataclasses.replace(chosen, short=False, price=0.114).computing == "11% more computing"
    assert dataclasses.replace(chosen, short=False, price=0.004).computing == "no more computing"
    assert dataclasses.replace(chosen, plan=Plan()).computing == "no more computing"
