"""Tests of the parts of an out-of-memory message: a model's needs, and the plans that would fit."""

from __future__ import annotations

import pytest
import torch

from grappe.engines.shared.memory_needs import Needs
from grappe.errors import GrappeError, OutOfMemory, TaskError
from grappe.plan import Plan
from grappe.tasks.pysource import PySource
from grappe.training.out_of_memory import explained, fits, is_out_of_memory, needs_of
from tests.parity.tasks import Images

MB = 1_000_000


def test_needs_are_counted_without_memory() -> None:
    needs = needs_of(PySource(size="xl"))
    assert needs.parameters == needs.gradients == sum(needs.units)
    assert needs.optimizer == pytest.approx(2 * needs.parameters, rel=1e-3)  # Adam's two, and its step counts
    assert 5.9e9 < needs.parameters < 6.0e9


def test_needs_know_momentum_and_what_is_frozen() -> None:
    task = Images(rule="sgd", frozen=True)
    needs, trained = needs_of(task), [p for p in task.model().parameters() if p.requires_grad]
    assert needs.gradients == needs.optimizer == 4 * sum(p.numel() for p in trained) < needs.parameters


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    from grappe.engines.deepspeed import library

    monkeypatch.setattr(library, "installed", lambda: False)


@pytest.mark.usefixtures("without_deepspeed")
@pytest.mark.parametrize(
    ("limit", "plans"),
    [
        (800, ["shard=2", "pipeline=2,microbatches=8"]),
        (540, ["shard=4", "pipeline=2,microbatches=8"]),
        (260, ["shard=8", "pipeline=8,microbatches=32"]),
        (120, []),
    ],
)
def test_the_smallest_of_each_kind_that_fits(limit: int, plans: list[str]) -> None:
    needs = Needs(parameters=200 * MB, gradients=200 * MB, optimizer=400 * MB, units=(25 * MB,) * 8)
    assert [str(plan) for plan, _ in fits(needs, Plan(), limit * MB, 100 * MB)] == plans


@pytest.mark.usefixtures("without_deepspeed")
def test_without_units_only_sharding_is_proposed_and_whole_parameters_count() -> None:
    needs = Needs(parameters=200 * MB, gradients=200 * MB, optimizer=400 * MB, units=())
    found = fits(needs, Plan(), 1200 * MB, 0)
    assert [(str(plan), need) for plan, need in found] == [("shard=2", 1000 * MB)]


@pytest.mark.parametrize(
    ("plan", "limit", "away"),
    [
        ("", 600, "engine=deepspeed,offload=nvme:FOLDER"),
        ("shard=2,zero=2,precision=bf16", 500, "engine=deepspeed,shard=2,precision=bf16,offload=nvme:FOLDER"),
        ("", 400, None),
        ("replicate=2", 600, None),
        ("pipeline=2", 600, None),
    ],
)
def test_a_disk_is_proposed_where_the_engine_is_there_and_it_would_do(
    monkeypatch: pytest.MonkeyPatch, plan: str, limit: int, away: str | None
) -> None:
    from grappe.engines.deepspeed import library

    needs = Needs(
        parameters=200 * MB, gradients=200 * MB, optimizer=400 * MB, units=(25 * MB,) * 8, largest=6 * MB
    )
    for there in (True, False):
        monkeypatch.setattr(library, "installed", lambda there=there: there)
        found = [str(one) for one, _ in fits(needs, Plan.parse(plan), limit * MB, 100 * MB)]
        assert [one for one in found if "nvme" in one] == ([away] if away and there else [])


def test_a_plan_keeps_what_it_has() -> None:
    needs = Needs(parameters=200 * MB, gradients=200 * MB, optimizer=400 * MB, units=(25 * MB,) * 8)
    request = Plan.parse("replicate=2,precision=bf16")
    assert str(fits(needs, request, 800 * MB, 0)[0][0]) == "replicate=2,shard=2,precision=bf16"


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (TaskError("the task ran out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_are_about_memory(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it
    with pytest.raises(OutOfMemory if is_it else type(error)) as caught, explained(Images(), Plan(), 3):
        raise error
    if is_it:
        assert isinstance(caught.value, GrappeError)
        assert "out of memory in process 3" in str(caught.value)
