"""Muon against torch's, and what its iteration does to singular values."""

import pytest
import torch
from packaging.version import Version

from grappe.optimizers import Muon
from grappe.optimizers.muon import SCALES, orthogonal
from tests.optimizers.published import away, problem, run

TORCHS = [name for name in SCALES if name != "spectral_unclamped" or Version(torch.__version__).release >= (2, 14)]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
@pytest.mark.parametrize("adjust", TORCHS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_are_updated_as_by_torch_but_for_bfloat16(adjust, nesterov, monkeypatch):
    settings = {"lr": 0.05, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}
    ours = run(lambda params: Muon(params[:2], **settings))[:2]
    theirs = run(lambda params: torch.optim.Muon(params[:2], **settings))[:2]
    assert away(theirs, ours) < 0.02
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())  # torch's, in float32
    monkeypatch.setattr(torch, "bfloat16", torch.float32)  # since 2.14: tensor.to(dtype=torch.bfloat16)
    assert away(run(lambda params: torch.optim.Muon(params[:2], **settings))[:2], ours) < 1e-5


def test_a_wide_matrix_has_the_scale_of_its_name() -> None:
    moved = {}
    for name in SCALES:
        parameter = torch.nn.Parameter(torch.zeros(4, 16))
        parameter.grad = torch.eye(4, 16)
        Muon([parameter], lr=1.0, adjust_lr_fn=name).step()  # type: ignore[arg-type]
        moved[name] = parameter.detach().norm()
    assert float(moved["spectral_unclamped"] / moved["original"]) == pytest.approx(0.5)
    assert float(moved["match_rms_adamw"] / moved["original"]) == pytest.approx(0.8)


def test_the_rest_is_updated_as_by_adamw() -> None:
    ours = run(lambda params: Muon(params, rest_lr=0.01, weight_decay=0.1))
    theirs = run(lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95)))
    assert away(theirs[3:4], ours[3:4]) < 1e-6  # of one dimension
    assert away(theirs[:1], ours[:1]) > 0.01


@pytest.mark.parametrize("shape", [(8, 8), (20, 5), (5, 20)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonal(matrix, 5))
    assert 0.6 < values.min() <= values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    cosine = torch.nn.functional.cosine_similarity((u @ v).flatten(), orthogonal(matrix, 5).flatten(), 0)
    assert cosine > 0.97


def test_a_convolution_is_a_matrix_of_its_filters() -> None:
    weight, gradient = problem()[0][2], problem()[1][0][2]
    results = []
    for shape in ((3, 2, 3, 3), (3, 18)):
        parameter = torch.nn.Parameter(weight.clone().view(shape))
        parameter.grad = gradient.view(shape)
        Muon([parameter]).step()
        results.append(parameter.detach().flatten())
    assert torch.equal(*results)


def test_patterns_and_groups_say_what_is_a_matrix() -> None:
    named = [(name, torch.nn.Parameter(torch.ones(2, 2))) for name in ("embed.weight", "a.weight", "head.weight")]
    named.append(("a.bias", torch.nn.Parameter(torch.ones(2))))
    muon = Muon(named, rest=["embed.*", "head.*"])
    assert [(group["muon"], group["lr"], group["param_names"]) for group in muon.param_groups] == [
        (True, 0.02, ["a.weight"]),
        (False, 3e-4, ["embed.weight", "head.weight", "a.bias"]),
    ]
    again = Muon(muon.param_groups)  # as Horovod makes it anew
    assert [group["lr"] for group in again.param_groups] == [0.02, 3e-4]
    split = Muon([{"params": named[:2], "weight_decay": 0.5}, {"params": named[2:], "muon": False, "lr": 1e-3}])
    assert [(group["weight_decay"], group["lr"]) for group in split.param_groups] == [(0.5, 0.02), (0.0, 1e-3)]
