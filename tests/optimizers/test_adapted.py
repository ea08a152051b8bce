"""LARS, LARC and LAMB against published implementations."""

import pytest
import torch

from grappe import optimizers
from grappe.errors import TaskError
from tests.optimizers.published import apex_larc, away, lamb, problem, run


def test_steps_are_those_of_apex_and_of_the_paper() -> None:
    ours = run(lambda params: optimizers.LARC(params, lr=0.1, weight_decay=0.01, trust_coefficient=0.02))
    # apex adds weight decay only where there is a rate, which the first step of a weight of zeros has not: the same.
    assert away(apex_larc(0.1, 0.9, 0.01, 0.02, clip=True), ours) < 1e-6
    # apex multiplies the velocity by lr, the paper what goes into it: the same for a constant one.
    ours = run(lambda params: optimizers.LARS(params, lr=2.0, weight_decay=0.01, trust_coefficient=0.02))
    assert away(apex_larc(2.0, 0.9, 0.01, 0.02, clip=False), ours) < 1e-6
    settings = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6}
    ours = run(lambda params: optimizers.LAMB(params, weight_decay=0.05, **settings))
    assert away(lamb(decay=0.05, **settings), ours) < 1e-6


def test_lars_has_the_papers_velocity_when_the_learning_rate_falls() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    lars = optimizers.LARS([weight], lr=1.0, momentum=0.5, trust_coefficient=0.1)
    weight.grad = torch.tensor([1.0, 0.0])
    lars.step()  # |w| = 5, |g| = 1: v = 0.5 (1, 0)
    assert weight.tolist() == pytest.approx([2.5, 4.0])
    lars.param_groups[0]["lr"] = 0.0
    lars.step()  # v = 0.25 (1, 0) still moves it
    assert weight.tolist() == pytest.approx([2.25, 4.0])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda p: optimizers.LARS(p, lr=0.1, weight_decay=0.1, adapt=False), torch.optim.SGD),
        (lambda p: optimizers.LARC(p, lr=0.1, weight_decay=0.1, adapt=False), torch.optim.SGD),
        (lambda p: optimizers.LAMB(p, lr=0.1, weight_decay=0.1, eps=1e-8, adapt=False), torch.optim.AdamW),
    ],
)
def test_what_is_not_adapted_is_torchs_own(ours, theirs) -> None:
    options = {"momentum": 0.9} if theirs is torch.optim.SGD else {}
    assert away(run(lambda p: theirs(p, lr=0.1, weight_decay=0.1, **options)), run(ours)) < 1e-6


def test_what_has_no_gradient_stays_and_gets_no_state() -> None:
    for kind in (optimizers.LARS, optimizers.LARC, optimizers.LAMB, optimizers.Muon):
        moved, still = (torch.nn.Parameter(weight) for weight in problem()[0][:2])
        before = still.clone()
        optimizer = kind([moved, still], lr=0.1, weight_decay=0.1)
        moved.grad = torch.ones_like(moved)
        optimizer.step()
        assert torch.equal(still, before)
        assert still not in optimizer.state


def test_a_closure_is_called_with_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))

    def closure() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    for kind in (optimizers.LARS, optimizers.LARC, optimizers.LAMB, optimizers.Muon):
        assert kind([weight], lr=0.0).step(closure).item() == 4.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: optimizers.LARS(p, lr=-1.0), "LARS(lr=-1.0): it must be at least 0"),
        (lambda p: optimizers.LARC(p, lr=1.0, momentum=1.0), "LARC(momentum=1.0): it must be at least 0 and below 1"),
        (lambda p: optimizers.LAMB(p, betas=(0.9, 2.0)), "LAMB(beta2=2.0)"),
        (lambda p: optimizers.LAMB(p, lr=float("nan")), "LAMB(lr=nan)"),
        (lambda p: optimizers.Muon(p, adjust_lr_fn="none"), "it is original or match_rms_adamw"),
        (lambda p: optimizers.Muon(p, rest=["head.*"]), "no parameter is called head.*"),
    ],
)  # fmt: skip
def test_a_wrong_number_is_named(make, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        make([torch.nn.Parameter(torch.ones(2, 2))])
    assert words in str(caught.value)
