"""Tests of the parts of an out-of-memory message: what was held, and the plans that are foreseen to fit."""

import dataclasses
import re
import resource
from pathlib import Path

import pytest
import torch

from grappe.errors import GrappeError, OutOfMemory, TaskError
from grappe.errors.causes import is_out_of_memory
from grappe.errors.user_code import user_call
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.search import MemoryBudget
from grappe.launch.fork import run_in_fork
from grappe.plan import Plan
from grappe.training import out_of_memory
from grappe.training.out_of_memory import LocalOutOfMemory, MemoryReport, reporting_out_of_memory, with_plan_that_fits
from tests.foresight.test_fake_model import Looks
from tests.short_source import Short as Source

MB = 1_000_000
SHORTAGE = MemoryReport(rank=1, held={"parameters": 152 * MB, "gradients": 0, "optimizer": 0}, other=5, before=9)


@pytest.fixture(scope="module")
def fake_model() -> FakeModel:
    """38 million parameters: 610 MB of states, 640 with activations; a tenth is added."""
    return FakeModel(Source(), Path("data"))


def limited(monkeypatch: pytest.MonkeyPatch, megabytes: int) -> None:
    monkeypatch.setattr(out_of_memory, "_limit", lambda: (megabytes * MB, "a limit", False))


@pytest.mark.slow
def test_the_message_has_what_is_missing_and_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1300)
    told = str(with_plan_that_fits(LocalOutOfMemory(SHORTAGE), Source(), Plan(), Path("data")))
    assert told.startswith("out of memory in process 1, which may take 1.3 GB (a limit). It held 152 MB of parameters")
    assert "0 MB of optimizer state (of 305 MB)" in told
    assert re.search(r"Foreseen to fit: microbatches=4 \([0-9.]+ GB a process\)", told)


def test_what_is_held_and_all_of_it_have_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1300)
    shortage = dataclasses.replace(SHORTAGE, held={"parameters": 302 * MB, "gradients": 0, "optimizer": 36})
    needed = {"parameters": 302 * MB, "gradients": 321_000, "optimizer": 302 * MB}
    told = out_of_memory._shortage_message(shortage, needed)
    assert "302 MB of parameters, 0 kB of gradients (of 321 kB), 0 MB of optimizer state (of 302 MB)" in told


def test_a_model_that_cannot_be_traced_is_told_with_general_advice(monkeypatch, tmp_path):
    limited(monkeypatch, 600)
    told = str(with_plan_that_fits(LocalOutOfMemory(SHORTAGE), Looks(), Plan(), tmp_path))
    assert re.search(r"Which plan fits is not foreseen \(Looks cannot .*take smaller microbatches, recompute", told)


def test_what_the_training_had_is_freed_before_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    freed = []

    class Large:
        def __del__(self) -> None:
            freed.append(True)

    def trains() -> None:
        kept = Large()
        with reporting_out_of_memory(0):
            raise MemoryError
        print(kept)

    monkeypatch.setattr(out_of_memory, "_foreseen", lambda *_: ({}, f"freed: {freed}"))
    try:
        trains()
    except LocalOutOfMemory as error:
        assert not freed
        assert "freed: [True]" in str(with_plan_that_fits(error, Looks(), Plan(), tmp_path))


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
def test_a_disk_is_proposed_where_the_engine_is_there_and_it_would_do(monkeypatch, plan, limit, away, fake_model):
    from grappe.contrib.deepspeed import library

    budget = MemoryBudget(whose="", size=limit * MB, beyond=0, gpu=False)
    for there in (True, False):
        monkeypatch.setattr(library, "installed", lambda there=there: there)
        found = [*out_of_memory._on_disk(fake_model, Plan.parse(plan), budget)]
        assert [name for name, _ in found] == ([away] if away and there else [])


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
    with pytest.raises(OutOfMemory if is_it else type(error)) as caught, reporting_out_of_memory(3):
        raise error
    if is_it:
        assert isinstance(caught.value, GrappeError)
        assert "out of memory in process 3" in str(caught.value)


@pytest.mark.parametrize("limited_kind", [None, resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_thread_without_room_is_short_of_memory_where_memory_is_limited(limited_kind, monkeypatch):
    def limit(kind: int) -> tuple[int, int]:
        return (10**9 if kind == limited_kind else resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    monkeypatch.setattr(resource, "getrlimit", limit)
    assert is_out_of_memory(RuntimeError("can't start new thread")) == (limited_kind is not None)


def test_a_method_of_the_task_without_memory_is_short_of_memory(tmp_path: Path) -> None:
    class Short:
        def model(self) -> None:
            raise MemoryError

    with pytest.raises(OutOfMemory, match=r"Short\.model\(\) ran out of memory: MemoryError"):
        run_in_fork(lambda: user_call(Short(), "model"))
    with pytest.raises(OutOfMemory, match="out of memory in process 3, which may take"), reporting_out_of_memory(3):
        user_call(Short(), "model")
    with pytest.raises(OutOfMemory, match="the process that makes the model ran out of memory: MemoryError"):
        run_in_fork(Short().model)


def test_a_training_on_the_cpu_of_a_machine_with_gpus_is_not_told_of_their_memory(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("grappe.profiling.memory.data_limit", lambda: None)
    assert "GPU" not in out_of_memory._limit()[1]
