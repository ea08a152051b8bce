"""Memory that libraries keep of a plan's kernels is measured: as much as a training's own process keeps."""

import dataclasses
import itertools
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grappe import Arrays, Task
from grappe.errors import ProcessDied
from grappe.foresight import forecast as measuring
from grappe.foresight import search
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import LibraryMemory, library_memory, memory_forecast
from grappe.foresight.kernels import Kernels
from grappe.foresight.search import MemoryBudget, foreseen
from grappe.launch.local import local
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.profiling.memory import data_size, return_freed_memory

MB = 1_000_000
CLOSE = 10 * MB  # a thread's stack
CHANNELS = (8, 64, 96, 128, 192)
PLAN = Plan.parse("precision=bf16,threads=2")
ROWS = 32


class Convolved(Task):
    """Convolutions of several shapes, whose kernels oneDNN compiles for each."""

    batch_size: int = ROWS

    def model(self) -> nn.Module:
        pairs = itertools.pairwise(CHANNELS)
        layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in pairs]
        return nn.Sequential(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def data(self, split: str, folder: Path) -> Any:
        return Arrays(torch.zeros(64, CHANNELS[0], 16, 16), torch.zeros(64, dtype=torch.int64))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named_parameters, lr=0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """The request for a step of the model in a process of its own."""

    run: None = None


def trained(request: Trained, process: ProcessRank, folder: Path) -> LibraryMemory:
    """Evaluates the model and runs a step of it, by torch alone; returns the bytes that stay beside its tensors."""
    return_freed_memory()
    torch.set_num_threads(2)
    model, (inputs, targets) = (Convolved().model(), (torch.zeros(ROWS, CHANNELS[0], 16, 16), torch.zeros(ROWS)))
    began = data_size()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(torch.cat([inputs, inputs]))
    evaluated = data_size()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), targets.long())
    loss.backward()
    del loss
    model.zero_grad(set_to_none=True)
    return LibraryMemory(evaluation=evaluated - began, step=data_size() - evaluated)


def advising(request: Trained, process: ProcessRank, folder: Path) -> LibraryMemory | None:
    """Measures as a process of a training does that got no more memory than a limit."""
    limit = data_size() + 600 * MB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return library_memory(FakeModel(Convolved(), Path("data"), kernels=Kernels(scratch=False)), PLAN, ROWS)


@pytest.fixture(scope="module")
def fake_model() -> FakeModel:
    return FakeModel(Convolved(), Path("data"), kernels=Kernels(scratch=False))


def test_what_is_kept_of_convolutions_in_bf16_is_what_a_training_keeps(fake_model: FakeModel) -> None:
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("kernels without AVX-512 keep nothing in bf16")
    found = library_memory(fake_model, PLAN, ROWS)
    real = local("tests.foresight.test_forecast:trained", Trained(), 1)
    assert real.step > 10 * MB, "these kernels keep nothing here, and the test says nothing"
    assert abs(found.total - real.total) < CLOSE, (found, real)


def test_a_process_of_a_training_measures_it_under_its_limit(fake_model: FakeModel) -> None:
    found = local("tests.foresight.test_forecast:advising", Trained(), 1)
    outside = library_memory(fake_model, PLAN, ROWS)
    assert abs(found.total - outside.total) < CLOSE


def test_a_plan_fits_only_with_what_its_kernels_keep(fake_model: FakeModel) -> None:
    plan = Plan.parse("threads=2")  # in bf16 each kernel takes seconds on a processor without it
    libraries = library_memory(fake_model, plan, fake_model.task.batch_size)
    assert libraries.total > MB, "it says nothing"
    needed = dataclasses.replace(memory_forecast(fake_model, plan), libraries=libraries)
    budget = MemoryBudget(whose="", size=needed.most + needed.libraries.total, beyond=0, margin=1.0, gpu=False)
    assert foreseen(fake_model, plan, ROWS, budget).fits
    assert not foreseen(fake_model, plan, ROWS, dataclasses.replace(budget, size=budget.size - MB)).fits


def test_an_evaluation_that_was_measured_counts_where_it_kept_more(fake_model: FakeModel) -> None:
    needed = dataclasses.replace(
        memory_forecast(fake_model, PLAN), libraries=LibraryMemory(evaluation=5 * MB, step=2 * MB)
    )
    budget = MemoryBudget(
        whose="", size=0, beyond=0, gpu=False, libraries=LibraryMemory(evaluation=8 * MB, step=9 * MB)
    )
    more = [
        budget.taken(needed) - dataclasses.replace(budget, libraries=search.NOTHING_KEPT).taken(needed),
        budget.taken(dataclasses.replace(needed, libraries=None)) - budget.taken(needed),
    ]
    assert more == [3 * MB, 7 * MB]


def test_the_process_that_keeps_most_counts(fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [LibraryMemory(evaluation=9, step=1), LibraryMemory(evaluation=3, step=8)]
    monkeypatch.setattr(measuring, "_measured", lambda calls, threads: kept[: len(calls)])
    assert library_memory(fake_model, Plan.parse("pipeline=2,microbatches=2"), ROWS) == kept[1]


def test_kernels_that_get_no_memory_leave_it_unknown(fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(*_: Any) -> None:
        raise ProcessDied("process 0")

    monkeypatch.setattr(measuring, "_measured", died)
    assert library_memory(fake_model, PLAN, ROWS) is None


def test_without_kernels_nothing_is_run() -> None:
    assert library_memory(FakeModel(Convolved(), Path("data")), PLAN, ROWS) is None
