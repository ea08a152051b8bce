"""Tied units: those that share a parameter with a module outside are left to the root, and learn the same."""

from __future__ import annotations

import pytest
from torch import nn

from grappe.parallel.ties import shared_parameters, untied
from grappe.verbs.verify.verify import verify
from tests.foresight.unusual import Tied


def test_units_that_share_a_parameter_are_left_out() -> None:
    model = Tied().model()
    units = Tied().units(model)
    assert untied(model, units) == [units[1]]
    first, last = (next(iter(unit.children())) for unit in (units[0], units[2]))
    assert shared_parameters(model) == {id(first.weight): {id(first), id(last)}}


def test_a_parameter_that_modules_of_one_unit_share_is_its_own() -> None:
    unit = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    unit[1].weight = unit[0].weight
    model = nn.Sequential(unit, nn.Linear(4, 4))
    assert untied(model, list(model)) == list(model)


@pytest.mark.parametrize(
    "plan", ["shard=2", "shard=2,zero=1,microbatches=2", "replicate=2,shard=2,recompute", "offload=cpu"]
)
def test_tied_units_learn_as_one_process_does(plan: str) -> None:
    [found] = verify(Tied(), [f"{plan},threads=1"], steps=3)
    assert found.verdict == "same"
