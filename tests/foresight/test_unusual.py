"""Models and batches that are harder to trace: foreseen as they are, or refused with the user's own line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from grappe.data.loader import training_order
from grappe.errors import TaskError
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import memory_forecast
from grappe.plan import Plan
from tests.foresight import unusual


@pytest.mark.parametrize(("task", "line"), [(unusual.Chosen, r"x\[x\[:, 0\] > 0\]"), (unusual.Numpy, r"x\.numpy\(\)")])
@pytest.mark.parametrize("plan", ["", "shard=2", "replicate=2,microbatches=2"])
def test_what_needs_values_is_refused_with_its_line(task: type, line: str, plan: str) -> None:
    with pytest.raises(TaskError, match=rf"{task.__name__} cannot run without values.*unusual\.py.*{line}"):
        memory_forecast(FakeModel(task(), Path("data")), Plan.parse(plan))


def test_ragged_samples_are_padded_as_the_trainings_first_batch() -> None:
    fake_model = FakeModel(unusual.Ragged(), Path("data"))
    for rows in (4, 64, 128, 1000):
        inputs = fake_model.batches.of(rows).microbatches[0].inputs
        assert tuple(inputs.shape) == (rows, 40)


def test_a_long_sample_that_is_not_among_the_first_counts_in_a_batch_that_has_it() -> None:
    class Late(unusual.Ragged):
        def data(self, split: str, folder: Path) -> object:
            first = training_order(self, unusual.Sentences()).ids(0, 0).tolist()
            return unusual.Sentences(long=frozenset({first[20]}))

    batches = FakeModel(Late(), Path("data")).batches
    assert [batches.of(rows).microbatches[0].inputs.shape[1] for rows in (16, 64)] == [10, 40]


def test_tied_weights_of_two_layers_are_one_parameter() -> None:
    found = memory_forecast(FakeModel(unusual.Ragged(), Path("data")), Plan())
    assert found.states.parameters == 4 * (500 * 128 + 128 * 128 + 128)
    assert found.states.optimizer == 2 * found.states.parameters + 3 * 4  # and a count of steps for each


def test_what_a_function_of_the_users_keeps_is_counted() -> None:
    plain, custom = (
        max(mark.level for mark in FakeModel(task(), Path("data")).trace(64).marks)
        for task in (unusual.Rows, unusual.Custom)
    )
    assert custom - plain >= 3 * 64 * 128 * 4  # one more tensor in each of three units


class Growing(torch.optim.SGD):
    """Keeps the last gradients, five at most."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    kept = self.state[one].setdefault("kept", [])
                    kept.append(one.grad.clone())
                    del kept[:-5]


class Late(torch.optim.SGD):
    """Makes its state in the second step."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    state = self.state[one]
                    if "steps" in state and "mean" not in state:
                        state["mean"] = torch.zeros_like(one)
                    state["steps"] = torch.ones(())


def test_a_state_that_grows_from_step_to_step_is_not_foreseen() -> None:
    class Kept(unusual.Rows):
        def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
            return Growing(named_parameters)

    with pytest.raises(TaskError, match="the state of Growing grows from step to step"):
        FakeModel(Kept(), Path("data"))


def test_a_state_that_the_second_step_makes_counts() -> None:
    class Second(unusual.Rows):
        def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
            return Late(named_parameters)

    found = FakeModel(Second(), Path("data")).parameters[0]
    assert (found.states, found.whole_states) == ((found.size,), (4,))


def test_sparse_gradients_are_not_foreseen() -> None:
    class Sparse(unusual.Rows):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Embedding(10, 4, sparse=True))

    with pytest.raises(TaskError, match=r"Sparse has sparse gradients.*grappe measure runs it"):
        FakeModel(Sparse(), Path("data"))
