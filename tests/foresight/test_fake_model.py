"""A trace has the bytes that the allocator counts, and leaves nothing behind."""

from pathlib import Path

import pytest
import torch
from torch import nn

from grappe import Arrays, Task
from grappe.errors import PlanError, TaskError
from grappe.foresight import kernels
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import memory_forecast
from grappe.foresight.memory import padded, rows_of
from grappe.foresight.trace import GRADIENT
from grappe.plan import Plan


class Twice(nn.Module):
    """A matrix that is called twice and tied, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.second(self.first(self.first(x))))


class Small(Task):
    batch_size: int = 4

    def model(self) -> nn.Module:
        return Twice()

    def data(self, split: str, folder: Path) -> Arrays:
        return Arrays(torch.ones(20, 8), torch.zeros(20, dtype=torch.int64))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.Adam(named_parameters)


class Normal(Small):
    """A layer whose kernel takes memory of its own."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))


class Looks(Small):
    """A model that reads a value."""

    def model(self) -> nn.Module:
        class Reading(Twice):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

        return Reading()


def test_a_tied_parameter_counts_once_and_a_frozen_one_has_no_gradient(tmp_path: Path) -> None:
    found = memory_forecast(FakeModel(Small(), tmp_path), Plan())
    assert found.states.parameters == 4 * (64 + 24 + 3)
    assert found.states.gradients == 4 * 64
    assert found.states.optimizer == 2 * 4 * 64 + 4  # and the count of its steps
    assert found.peak > found.states.total


def test_a_trace_marks_each_gradient_once_and_ends_empty(tmp_path: Path) -> None:
    trace = FakeModel(Small(), tmp_path).trace(4)
    assert [mark.which for mark in trace.marks if mark.kind == GRADIENT] == [0]
    assert trace.marks[-1].level == 0
    assert trace.batch == 4 * 8 * 4 + 4 * 8


def test_a_larger_batch_than_was_read_has_activations_in_proportion(tmp_path: Path) -> None:
    fake_model = FakeModel(Small(batch_size=64), tmp_path)
    peaks = [max(mark.peak for mark in fake_model.trace(rows).marks) for rows in (100, 200, 300)]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0


def test_a_model_that_reads_values_and_a_task_that_fails_are_named_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Looks cannot run without values.*test_fake_model\.py.*item"):
        FakeModel(Looks(), tmp_path).trace(4)
    with pytest.raises(TaskError, match=r"no such picture.*test_fake_model\.py"):
        FakeModel(Broken(), tmp_path)
    with pytest.raises(TaskError, match=r"nothing.*test_fake_model\.py.*tensor_plan"):
        memory_forecast(FakeModel(Unsplit(), tmp_path), Plan.parse("tensor=2"))


class Broken(Small):
    """Samples that cannot be read."""

    def data(self, split: str, folder: Path) -> list[int]:
        class Samples(list):
            def __getitem__(self, index: int) -> None:
                raise ValueError("no such picture")

        return Samples(range(20))


class Unsplit(Small):
    """A tensor plan that fails."""

    def tensor_plan(self, model: nn.Module) -> dict[str, object]:
        return {"first": model.nothing}


@pytest.mark.parametrize("plan", ["pipeline=2,microbatches=2", "tensor=2"])
def test_a_model_of_transformers_is_split_as_in_a_training(plan: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.parallel.families import Llama

    fake_model = FakeModel(Llama(), tmp_path)
    whole = sum(one.size for one in fake_model.parameters)
    found = memory_forecast(fake_model, Plan.parse(plan)).states.parameters
    assert whole / 2 <= found < whole * 0.75


def test_a_kernel_that_is_too_large_to_be_tried_leaves_the_peak_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "LARGEST", 100)
    fake_model = FakeModel(Normal(), tmp_path, kernels=kernels.Kernels())
    assert memory_forecast(fake_model, Plan()).peak is None


@pytest.mark.parametrize("text", ["engine=textbook,replicate=2", "compile", "exact=2"])
def test_what_is_not_known_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="grappe measure"):
        memory_forecast(FakeModel(Small(), tmp_path), Plan.parse(text))


def test_what_check_adds_is_foreseen_by_count(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"check=100 adds: 0.50% of a step"):
        memory_forecast(FakeModel(Small(), tmp_path), Plan.parse("exact=8,replicate=4,check=100"))
    assert Plan.parse("exact=4,replicate=4,check=100").checked == 0.01 and Plan.parse("exact=4").checked == 0


def test_rows_are_split_as_torch_chunks_them(tmp_path: Path) -> None:
    one = FakeModel(Small(), tmp_path).parameters[1]  # the frozen weight, of 3 rows
    assert one.shape == (3, 8)
    chunks = torch.empty(3, 8).chunk(4)
    assert [rows_of(one, 4, rank) for rank in range(4)] == [*map(len, chunks), 0]
    assert padded(one, 4) == 4 * 8 * 4
