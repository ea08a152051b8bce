"""The ramp, and the task that it is put into."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grappe.errors import TaskError, UsageError
from grappe.verbs.lr_find.ramp import Ramp, ramped
from tests.parity.tasks import Images


def test_it_goes_from_the_lowest_to_the_highest() -> None:
    steep = Ramp(lowest=0.01, highest=1.0, steps=21)
    assert [steep.at(step, 0.1) for step in (0, 10, 20, 99)] == pytest.approx([0.01, 0.1, 1.0, 1.0])
    even = Ramp(kind="linear", lowest=1.0, highest=3.0, steps=21)
    assert [even.at(step, 0.1) for step in (0, 10, 20)] == pytest.approx([1.0, 2.0, 3.0])
    assert Ramp().ends(0.1) == pytest.approx((1e-4, 100.0))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"steps": 5}, "--steps=5: it must be at least 20"),
        ({"seeds": 0}, "--seeds=0"),
        ({"lowest": 0.0}, "--lowest=0.0: a learning rate is above 0"),
        ({"highest": float("inf")}, "--highest=inf"),
        ({"highest": float("nan")}, "--highest=nan"),
        ({"lowest": 1.0, "highest": 0.1}, "--lowest=1.0 is not below --highest=0.1"),
    ],
)
def test_what_is_no_ramp_is_refused(options: dict, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        Ramp(**options)
    assert told in str(refused.value)


def test_a_lowest_above_the_default_highest_is_refused() -> None:
    with pytest.raises(UsageError, match="give both --lowest and --highest"):
        Ramp(lowest=1e6).ends(0.1)


def test_groups_keep_their_proportion_and_the_task_all_else() -> None:
    task = Images(seed=3)
    other = ramped(task, Ramp(lowest=0.02, highest=2.0, steps=21))
    assert (other.seed, other.batch_size, type(other).__qualname__) == (3, task.batch_size, "Images")
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1)
    schedule = other.schedule(optimizer, 20)
    rates = []
    for _ in range(21):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx([0.02, 0.1])
    assert rates[-1] == pytest.approx([2.0, 10.0])


def test_a_learning_rate_of_zero_is_named() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.0)
    with pytest.raises(TaskError, match="lr=0"):
        ramped(Images(), Ramp()).schedule(optimizer, 20)
