"""Passes: torch's own schedules have the same order."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from grappe.foresight.fake_group import pretended
from grappe.foresight.passes import order_of
from grappe.parallel.pipeline.rules import RULES, stages_each
from grappe.plan import Plan

KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "inputs",
    "BACKWARD_WEIGHT": "weights",
}
"""torch's names of passes, and ours."""


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zero_bubble,stages=2"])
@pytest.mark.parametrize("micros", [4, 8])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_the_order_of_a_schedule_of_several_stages_is_torchs(place: int, micros: int, schedule: str) -> None:
    plan = Plan.parse(f"pipeline=4,microbatches={micros},schedule={schedule}")
    with pretended(Plan(tensor=4)) as world:
        assert world.mesh is not None
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
