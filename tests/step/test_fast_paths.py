"""An optimizer's step without torch's wrapper is the same step, and nobody who looks on misses it."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from grappe.step.fast_paths import OptimizerStep


class Own(Optimizer):
    """A user's own, which knows nothing of wrappers."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


class Derived(SGD):
    """Has a step of its own around another's."""

    def step(self, closure=None):
        super().step(closure)


MAKES = [
    lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
    Own,
    lambda parameters: Derived(parameters, lr=0.1),
]


def learned(make: Callable, stepper: Callable[[Optimizer], Callable[[], object]], scheduled: bool) -> list:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    made = make(model.parameters())
    schedule = lr_scheduler.StepLR(made, 2, 0.5) if scheduled else None
    step = stepper(made)
    for _ in range(4):
        model(torch.randn(5, 3)).square().sum().backward()
        step()
        made.zero_grad()
        if schedule is not None:
            schedule.step()
    return [copy.deepcopy(one) for one in (*model.parameters(), *made.state.values())]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("scheduled", [False, True])
def test_it_learns_the_same_to_the_bit(make: Callable, scheduled: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a schedule warns where no step was taken before its own
        found = learned(make, OptimizerStep, scheduled)
    torch.testing.assert_close(found, learned(make, lambda made: made.step, scheduled), rtol=0, atol=0)


def test_torchs_wrapper_is_left_out() -> None:
    """Else this file is of no use: a new torch may be wrapped otherwise."""
    assert OptimizerStep(SGD([nn.Parameter(torch.ones(1))]))._inside is not None


@pytest.mark.parametrize(
    "register",
    [
        lambda made, hook: made.register_step_pre_hook(hook),
        lambda made, hook: made.register_step_post_hook(hook),
        lambda made, hook: register_optimizer_step_pre_hook(hook),
        lambda made, hook: register_optimizer_step_post_hook(hook),
    ],
)
def test_hooks_are_called_also_when_they_come_later(register: Callable) -> None:
    made = SGD([nn.Parameter(torch.ones(1))])
    step, called = OptimizerStep(made), []
    handle = register(made, lambda *_: called.append(1))
    step()
    handle.remove()
    step()
    assert called == [1]


def test_a_step_that_was_replaced_is_taken() -> None:
    made, called = SGD([nn.Parameter(torch.ones(1))]), []
    step = OptimizerStep(made)
    made.step = lambda: called.append(1)
    step()
    assert called == [1]


def test_a_profiler_sees_it() -> None:
    step = OptimizerStep(SGD([nn.Parameter(torch.ones(1))]))
    with torch.profiler.profile() as profiler:
        step()
    assert "Optimizer.step#SGD.step" in {one.name for one in profiler.events()}
