"""Strategies of Lightning's: whoever types one where a plan is expected learns which plan it is."""

from __future__ import annotations

import re

import pytest

from grappe import engines
from grappe.errors import PlanError
from grappe.errors.strategies import HERE
from grappe.plan import Plan

PLANS = re.compile(r"\b((?:engine|shard|replicate)=[a-z0-9:,=_A-Z]+)")


@pytest.mark.parametrize("name", HERE)
def test_each_is_refused_with_what_took_its_place(name: str) -> None:
    for text in (name, f"strategy={name}", f"replicate=2,{name}"):
        with pytest.raises(PlanError) as refused:
            Plan.parse(text)
        assert HERE[name] in str(refused.value)


@pytest.mark.parametrize("name", HERE)
def test_the_plans_that_are_named_exist(name: str) -> None:
    for text in PLANS.findall(HERE[name]):
        plan = Plan.parse(re.sub(r"=[NM]\b", "=2", text).replace("FOLDER", "/tmp").rstrip(",:"))
        engines.check_name(plan.engine)


def test_lightnings_own_registry_is_covered() -> None:
    registry = pytest.importorskip("lightning.pytorch.strategies").StrategyRegistry
    names = [name for name in registry.available_strategies() if "xla" not in name and "tpu" not in name]
    assert len(names) >= 10
    for name in names:
        with pytest.raises(PlanError, match="is a strategy of Lightning's"):
            Plan.parse(name)


def test_keys_of_plans_are_no_strategies() -> None:
    assert Plan.parse("engine=deepspeed,shard=2").shard == 2
    with pytest.raises(PlanError, match="as in replicate=2"):
        Plan.parse("strategy=mine")
