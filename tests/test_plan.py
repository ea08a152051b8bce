"""A plan's text, its checks, and its arithmetic."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grappe import engines
from grappe.errors import PlanError
from grappe.plan import NO_KEYS, STRATEGIES, Plan, as_plan, recompute_of


@settings(deadline=None)
@given(
    replicate=st.integers(1, 64),
    shard=st.integers(2, 64),
    zero=st.sampled_from([1, 2, 3]),
    precision=st.sampled_from(["fp32", "tf32", "bf16", "fp16"]),
    flags=st.sets(st.sampled_from(["recompute", "compile", "channels_last"])),
    threads=st.none() | st.integers(1, 128),
)
def test_a_plan_survives_its_text(replicate, shard, zero, precision, flags, threads) -> None:
    degrees = {"replicate": replicate, "shard": shard, "zero": zero}
    plan = Plan(**degrees, precision=precision, threads=threads, **dict.fromkeys(flags, True))
    assert Plan.parse(str(plan)) == plan
    assert plan.processes == replicate * shard


def test_only_what_differs_is_written() -> None:
    assert str(Plan()) == ""
    assert str(Plan(replicate=2, precision="bf16")) == "replicate=2,precision=bf16"
    assert str(Plan.parse("compile, replicate=1")) == "compile"
    assert Plan.parse("workers=auto").workers is None


def test_a_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().replicate = 2  # type: ignore[misc]
    assert as_plan("replicate=3") == as_plan(Plan(replicate=3))


PLANS = re.compile(r"\b((?:engine|shard|replicate)=[a-z0-9:,=_A-Z]+)")


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_is_refused_with_what_took_its_place(name: str) -> None:
    for text in (name, f"strategy={name}", f"replicate=2,{name}"):
        with pytest.raises(PlanError) as refused:
            Plan.parse(text)
        assert STRATEGIES[name] in str(refused.value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_plans_that_are_named_exist(name: str) -> None:
    for text in PLANS.findall(STRATEGIES[name]):
        plan = Plan.parse(re.sub(r"=[NM]\b", "=2", text).replace("FOLDER", "/tmp").rstrip(",:"))
        engines.check_name(plan.engine)


@pytest.mark.parametrize("part", NO_KEYS)
def test_words_of_other_pages_are_answered(part: str) -> None:
    for text in (part, f"replicate=2,{part}" + "=2" * ("=" not in part)):
        with pytest.raises(PlanError) as refused:
            Plan.parse(text)
        assert NO_KEYS[part] in str(refused.value)
    Plan.parse("engine=deepspeed,shard=2,offload=nvme:scratch")


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


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        (["", "", ""], False),
        (["full"] * 3, True),
        (["selective"] * 3, "selective"),
        (["full", "full", "", "selective"], "full:0-1+selective:3"),
        (["", "full", "selective", "full"], "full:1+selective:2+full:3"),
    ],
)
def test_what_units_recompute_has_one_text(levels: list[str], text: bool | str) -> None:
    assert recompute_of(levels) == text
    assert Plan.parse(str(Plan(recompute=text))).recomputed(len(levels)) == levels
