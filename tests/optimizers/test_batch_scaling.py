"""The rate of a batch that is k times larger, and its warm-up: within torch's own schedules."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, OneCycleLR

import grappe
from grappe.engines.shared.state import position
from grappe.errors import TaskError
from grappe.optimizers import scale_factor, warmed_up
from grappe.tasks.cifar10 import Cifar10
from grappe.tasks.digits import Digits
from grappe.tasks.fashion_mnist import FashionMnist
from grappe.tasks.imagenet import ImageNet
from grappe.tasks.mnist import Mnist
from grappe.training.options import Options
from tests.rates import rates


def scaled_rates(lr: float, factor: float, steps: int, *, cosine: bool, total: int = 100) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr * factor)
    schedule = CosineAnnealingLR(optimizer, total) if cosine else None
    schedule = warmed_up(optimizer, schedule, factor=factor, steps=steps)
    return rates(optimizer, schedule, total)


def test_factors() -> None:
    assert scale_factor("none", batch_size=256, base=64) == 1
    assert scale_factor("linear", batch_size=256, base=64) == 4
    assert scale_factor("sqrt", batch_size=256, base=64) == 2
    assert scale_factor("linear", batch_size=32, base=64) == 0.5


def test_the_warm_up_begins_at_the_unscaled_rate() -> None:
    constant = scaled_rates(0.1, 4.0, 10, cosine=False)
    assert constant[0] == pytest.approx(0.1)
    assert constant[5] == pytest.approx(0.25)
    assert constant[10:] == pytest.approx([0.4] * 90)
    falling = scaled_rates(0.1, 4.0, 10, cosine=True)
    assert falling[0] == pytest.approx(0.1)
    for step in (10, 50, 90):
        assert falling[step] == pytest.approx(0.2 * (1 + math.cos(math.pi * step / 100)), rel=1e-4)


def test_what_is_not_scaled_up_has_no_warm_up() -> None:
    assert scaled_rates(0.1, 1.0, 10, cosine=False) == [0.1] * 100
    assert scaled_rates(0.1, 0.5, 10, cosine=True) == scaled_rates(0.05, 1.0, 0, cosine=True)


@pytest.mark.parametrize(
    "made",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.4, total_steps=100),
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 10),
    ],
)
def test_a_schedule_that_would_undo_the_warm_up_is_refused(made: Callable[..., LRScheduler]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4, momentum=0.9)
    schedule = made(optimizer)
    assert warmed_up(optimizer, schedule, factor=1.0, steps=10) is schedule
    with pytest.raises(TaskError, match=f"{type(schedule).__name__} .* would undo the warm-up"):
        warmed_up(optimizer, schedule, factor=4.0, steps=10)


@pytest.mark.parametrize("kind", [Digits, Cifar10, FashionMnist, Mnist, ImageNet])
def test_shipped_tasks_scale_from_their_own_batch(kind: type) -> None:
    base = kind()
    larger = kind(batch_size=4 * base.batch_size, lr_scaling="linear")
    named = [("weight", torch.nn.Parameter(torch.zeros(2, 2))), ("bias", torch.nn.Parameter(torch.zeros(2)))]
    assert larger.optimizer(named).param_groups[0]["lr"] == pytest.approx(4 * base.lr)
    assert base.optimizer(named).param_groups[0]["lr"] == base.lr
    optimizer = larger.optimizer(named)
    larger.schedule(optimizer, 100)
    assert optimizer.param_groups[0]["lr"] <= 1.01 * base.lr  # at step 0


def test_a_chained_schedule_is_saved_and_resumed(tmp_path: Path) -> None:
    def losses(name: str, *steps: int | None) -> list[tuple]:
        for last in steps:
            task = Digits(batch_size=512, lr_scaling="linear", epochs=8)
            run = grappe.train(task, "threads=1", tmp_path / name, options=Options(steps=last, evaluate_every=12))
        return [(one["loss"], one["lr"]) for one in run.records("step")]

    assert losses("parts", 1, 7, None) == losses("whole", None)


class Own(LRScheduler):
    """A schedule whose state does not say its step."""

    def get_lr(self) -> list[float]:
        return [0.1 for _ in self.base_lrs]

    def state_dict(self) -> dict:
        return {}


def test_a_schedules_step_is_its_own_where_its_state_has_none() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule = Own(optimizer)
    optimizer.step()
    schedule.step()
    world = SimpleNamespace(data_size=1)
    assert position(schedule, world)["schedule_steps"] == 1  # type: ignore[arg-type]
