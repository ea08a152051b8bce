"""Tied units: those that share a parameter with a module outside are left to the root, and learn the same."""

from __future__ import annotations

import pytest
from torch import nn

from grappe.parallel.ties import shared_parameters, untied
from grappe.task import Task
from grappe.verbs.verify.verify import verify
from tests.foresight import unusual
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


def test_units_that_share_a_module_or_are_listed_twice_are_left_out() -> None:
    common, own = nn.Linear(4, 4), nn.Linear(4, 4)
    one, two, three = nn.Sequential(common), nn.Sequential(common, nn.Tanh()), nn.Sequential(own)
    model = nn.Sequential(one, two, three, three)
    assert untied(model, [one, two, three]) == [three]
    assert untied(model, [one, three, three]) == [one]


def test_a_unit_may_be_inside_another() -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    outer = nn.Sequential(inner, nn.Linear(4, 4))
    assert untied(nn.Sequential(outer), [inner, outer]) == [inner, outer]


@pytest.mark.parametrize("task", [unusual.Common, unusual.Repeated])
@pytest.mark.parametrize("plan", ["shard=2", "shard=2,zero=1", "offload=cpu"])
def test_units_with_a_common_module_learn_as_one_process_does(task: type[Task], plan: str) -> None:
    [found] = verify(task(), [f"{plan},threads=1"], steps=3)
    assert found.verdict == "same"


@pytest.mark.parametrize(
    "plan", ["shard=2", "shard=2,zero=1,microbatches=2", "replicate=2,shard=2,recompute", "offload=cpu"]
)
def test_tied_units_learn_as_one_process_does(plan: str) -> None:
    [found] = verify(Tied(), [f"{plan},threads=1"], steps=3)
    assert found.verdict == "same"
