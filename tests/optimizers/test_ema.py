"""EMA against torch.optim.swa_utils."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from grappe.optimizers import EMA


def test_it_is_torchs_averaged_model() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ours = EMA(torch.optim.Adam(model.parameters(), lr=0.1), decay=0.9)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.1)
    inputs = torch.randn(4, 3)
    for _ in range(4):
        for one, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad()
            one(inputs).square().sum().backward()
            optimizer.step()
        averaged.update_parameters(plain)
    before = [parameter.clone() for parameter in model.parameters()]
    ours.eval()
    ours.eval()  # twice is once
    for mine, wanted in zip(model.parameters(), averaged.module.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=0)
    ours.train()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_a_parameter_that_comes_later_is_averaged_from_then_on() -> None:
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    ema = EMA(torch.optim.Adam([early, late], lr=0.1))
    early.grad = torch.ones(2)
    ema.step()
    late.grad = torch.ones(2)
    ema.step()
    assert set(ema.state[late]) == {"step", "exp_avg", "exp_avg_sq", "average"}
    assert torch.equal(ema.state[late]["average"], late)
