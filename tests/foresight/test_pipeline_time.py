"""The simulated schedules have the idle times that their papers give."""

from __future__ import annotations

import pytest

from grappe.errors import PlanError
from grappe.foresight.pipeline_time import orders_of, simulate
from grappe.plan import Plan

FORWARD, BACKWARD = 1.0, 2.0


def simulated(text: str, each: int = 1, transfer: float = 0.0):
    plan = Plan.parse(text)
    took = {True: FORWARD / each, False: BACKWARD / each}
    return simulate(orders_of(plan), lambda ahead, stage: took[ahead], lambda stage: transfer)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("processes", "micros"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_of_m_microbatches_a_share_of_p_less_1_is_idle(schedule: str, processes: int, micros: int) -> None:
    found = simulated(f"pipeline={processes},microbatches={micros},schedule={schedule}")
    assert found.seconds == pytest.approx((micros + processes - 1) * (FORWARD + BACKWARD))
    assert found.bubble == pytest.approx((processes - 1) * (FORWARD + BACKWARD))


@pytest.mark.parametrize("each", [2, 4])
def test_interleaved_stages_divide_the_idle_time(each: int) -> None:
    found = simulated(f"pipeline=4,microbatches=8,schedule=interleaved,stages={each}", each)
    assert found.bubble == pytest.approx(3 * (FORWARD + BACKWARD) / each)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_each_pass_is_made_once(schedule: str) -> None:
    each = 2 if schedule == "interleaved" else 1
    orders = orders_of(Plan.parse(f"pipeline=2,microbatches=6,schedule={schedule}"))
    passes = [one for order in orders for one in order]
    assert len(passes) == len(set(passes)) == 2 * 6 * 2 * each


def test_messages_are_waited_for_between_processes() -> None:
    assert (
        simulated("pipeline=2,microbatches=2", transfer=0.5).seconds
        > simulated("pipeline=2,microbatches=2").seconds
    )


def test_a_schedule_that_is_not_simulated_says_so() -> None:
    with pytest.raises(PlanError, match="zero_bubble: its time is not foreseen"):
        orders_of(Plan.parse("pipeline=2,microbatches=4,schedule=zero_bubble"))
