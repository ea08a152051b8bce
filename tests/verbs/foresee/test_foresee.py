"""The table and sentences of grappe foresee: of each plan, and of a site's GPUs."""

from __future__ import annotations

import pytest

from grappe.cli import foreseeing
from grappe.errors import TaskError, UsageError
from grappe.foresight.search import Foreseen, Room
from grappe.verbs.foresee.foresee import foresee, room_of
from grappe.verbs.foresee.table import sentences
from grappe.verbs.foresee.times import Timed, Times
from tests.foresight import test_sketch, unusual
from tests.foresight.test_search import needing


def test_a_sites_gpu_has_the_memory_that_its_name_says() -> None:
    assert room_of("narval").size == 40 * 10**9
    assert room_of("jean-zay-v100").size == 16 * 10**9  # 16 or 32
    with pytest.raises(UsageError, match="narval-cpu"):
        room_of("narval-cpu")


def test_the_first_that_fits_is_named_or_what_to_change() -> None:
    room = Room(whose="a GPU", size=20 * 10**9)
    too_big = Foreseen(plan="", processes=1, batch=8, needs=needing(30 * 10**9), fits=False)
    fitting = Foreseen(plan="shard=2", processes=2, batch=8, needs=needing(10 * 10**9), fits=True)
    assert "the first that fits: shard=2" in sentences([too_big, fitting], room)[-1]
    assert "none of them fits" in sentences([too_big], room)[-1]
    unknown = Foreseen(plan="pipeline=2", processes=2, batch=8, needs=needing(None), fits=None)
    assert "none of them fits" not in sentences([too_big, unknown], room)[-1]


def test_a_plan_that_is_not_foreseen_says_why_and_the_others_are_foreseen() -> None:
    times = foresee("digits", ["compile", "tensor=2", "offload=cpu"], site="narval")
    found = [one.foreseen for one in times.plans]
    assert "compile" in found[0].why and "tensor_plan" in found[1].why
    assert found[2].needs is not None and found[2].needs.peak is None


@pytest.mark.parametrize(
    ("plan", "why", "said"),
    [
        ("compile", "compile: not known", "compile: not known"),
        ("engine=x,shard=4", "engine=x: not known", "engine=x,shard=4: not known"),
        ("shard=4", "a pipeline: not known", "shard=4: a pipeline: not known"),
        ("", "not known", "one process: not known"),
    ],
)
def test_a_reason_begins_with_its_plan_once(plan: str, why: str, said: str) -> None:
    found = Foreseen(plan=plan, processes=1, batch=8, needs=None, why=why)
    assert sentences([found], None) == [said]


def test_units_that_are_not_the_model_refuse_a_pipeline_alone() -> None:
    tasks = unusual.__file__
    times = foresee(f"{tasks}:Unchained", ["", "pipeline=2,microbatches=2"])
    assert times.plans[0].foreseen.needs is not None
    why = times.plans[1].foreseen.why
    assert "runs Unchained.units() one after the other" in why and "must be the whole model" in why
    for name in ("Twice", "Swapped"):
        times = foresee(f"{tasks}:{name}", ["", "pipeline=2,microbatches=2"])
        assert times.plans[0].foreseen.needs is not None
        assert "do not compute what the model computes" in times.plans[1].foreseen.why


def test_plans_of_which_none_can_be_foreseen_are_refused() -> None:
    with pytest.raises(UsageError, match="compile: what it keeps in memory is not foreseen"):
        foresee("digits", ["compile"])


def test_a_task_that_reads_values_is_said_once() -> None:
    with pytest.raises(TaskError, match=r"cannot run without values"):
        foresee(f"{test_sketch.__file__}:Looks", ["", "microbatches=2"])


@pytest.mark.parametrize(("fits", "code"), [((False, None), 0), ((False, False), 1), ((True, False), 0)])
def test_the_exit_code_is_1_only_if_none_fits_for_sure(
    fits: tuple[bool | None, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Foreseen(plan="", processes=1, batch=8, needs=needing(10**9), fits=one) for one in fits]
    times = Times(plans=tuple(Timed(foreseen=one) for one in found))
    monkeypatch.setattr("grappe.verbs.foresee.foresee.foresee", lambda *_, **__: times)
    assert foreseeing.foresee("digits", site="narval") == code
