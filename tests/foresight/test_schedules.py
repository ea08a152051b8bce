"""Schedules have torch's own order, the idle times that their papers give, and those of real pipelines."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from grappe.foresight.fake_model import pretended
from grappe.foresight.pipeline_trace import Kind, SimulatedStep, order_of, orders_of, simulate
from grappe.parallel.pipeline.rules import RULES, stages_each
from grappe.plan import Plan
from tests.foresight import clocks
from tests.processes import Pool

KINDS = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "inputs", "BACKWARD_WEIGHT": "weights"}
"""torch's names of passes, and ours."""


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zero_bubble,stages=2"])
@pytest.mark.parametrize("micros", [4, 8])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_the_order_of_a_schedule_of_several_stages_is_torchs(place: int, micros: int, schedule: str) -> None:
    plan = Plan.parse(f"pipeline=4,microbatches={micros},schedule={schedule}")
    with pretended(Plan(tensor=4)) as world:
        group = world.mesh["tensor"].get_group()
        stages = [
            PipelineStage(nn.Identity(), number, 4 * stages_each(plan), torch.device("cpu"), group=group)
            for number in range(0, 4 * stages_each(plan), 4)
        ]
        made = getattr(schedules, RULES[plan.schedule].torch_name)(stages, n_microbatches=micros)
        order = [one for one in made.pipeline_order[place] if one is not None]
    found = [(KINDS[one.computation_type.name], one.stage_index, one.microbatch_index) for one in order]
    assert found == order_of(plan, place)


def test_1f1b_has_as_many_microbatches_under_way_as_stages_follow() -> None:
    plan = Plan.parse("pipeline=2,microbatches=3")
    assert order_of(plan, 1) == [(kind, 1, micro) for micro in range(3) for kind in ("forward", "backward")]
    assert "".join(kind[0] for kind, _, _ in order_of(plan, 0)) == "ffbfbb"


def simulated(
    text: str, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0, transfer: float = 0.0
) -> SimulatedStep:
    """A step of stages that are all alike; torch leaves the first one's whole backward to the weights' pass."""
    took = {"forward": forward, "inputs": inputs, "weights": weights, "backward": inputs + weights}

    def seconds(kind: Kind, stage: int) -> float:
        if stage == 0 and kind in ("inputs", "weights"):
            return took["backward"] if kind == "weights" else 0.0
        return took[kind]

    return simulate(orders_of(Plan.parse(text)), seconds, lambda stage: transfer)


PLANS = st.builds(
    lambda schedule, processes, rounds, each: (
        f"pipeline={processes},microbatches={processes * rounds},schedule={schedule}"
        + (f",stages={each}" if schedule == "interleaved" else "")
    ),
    st.sampled_from(sorted(RULES)),
    st.integers(2, 8),
    st.integers(1, 4),
    st.integers(2, 4),
)


@given(text=PLANS, forward=st.floats(0.5, 4.0), half=st.floats(0.5, 4.0))
def test_the_idle_share_is_that_of_the_closed_formula(text: str, forward: float, half: float) -> None:
    plan = Plan.parse(text)
    if plan.schedule == "zero_bubble":  # the formula is of three passes that take the same
        forward = half
    found = simulated(text, forward, half, half)
    # (p-1)/m for gpipe and 1f1b (Huang et al. 2019), (p-1)/(vm) for interleaved (Narayanan et al. 2021), (p-1)/(3m) for
    # zero_bubble (Qi et al. 2023).
    rounds = {"interleaved": stages_each(plan), "zero_bubble": 3}.get(plan.schedule, 1)
    idle = (plan.pipeline - 1) / (rounds * plan.microbatches)
    assert found.bubble / max(found.busy) == pytest.approx(idle)
    assert found.bubble / found.seconds == pytest.approx(idle / (1 + idle))


@given(text=PLANS)
def test_each_pass_is_made_once(text: str) -> None:
    plan = Plan.parse(text)
    passes = [one for order in orders_of(plan) for one in order]
    kinds = 3 if plan.schedule == "zero_bubble" else 2
    assert len(passes) == len(set(passes)) == kinds * plan.pipeline * plan.microbatches * stages_each(plan)


@pytest.mark.parametrize("schedule", sorted(RULES))
def test_a_real_pipeline_waits_as_long_as_the_simulated_one(schedule: str, pool: Pool) -> None:
    text = f"pipeline=2,microbatches=4,schedule={schedule}"
    found = simulated(text, clocks.FORWARD, clocks.INPUTS, clocks.WEIGHTS)
    stages = 2 * stages_each(Plan.parse(text))
    measured = pool.run("tests.foresight.clocks:step", 2, text, stages)
    assert max(now for now, _ in measured) == found.seconds
    assert tuple(busy for _, busy in measured) == found.busy


def test_messages_are_waited_for_between_processes() -> None:
    assert simulated("pipeline=2,microbatches=2", transfer=0.5).seconds > simulated("pipeline=2,microbatches=2").seconds


@given(text=PLANS)
def test_messages_go_over_the_boundary_between_two_stages(text: str) -> None:
    """The gradient that a stage sends back is as large as what it was handed, not as what it hands on."""
    plan, crossed = Plan.parse(text), set[int]()

    def transfer(stage: int) -> float:
        crossed.add(stage)
        return 0.0

    simulate(orders_of(plan), lambda kind, stage: 1.0, transfer)
    assert crossed == set(range(plan.pipeline * stages_each(plan) - 1))
