"""A copy of a model has its own of what a plan puts around a forward."""

import copy
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.parallel.batchnorm import synchronise_batchnorm
from grappe.parallel.parallelize import prepare_made
from grappe.parallel.replicate import SumsCarrier
from grappe.plan import Plan


@pytest.mark.parametrize("text", ["precision=bf16", "recompute", "batchnorm=sync"])
def test_a_copy_of_a_model_computes_with_its_own_weights(text: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    prepare_made(model, [], Plan.parse(text), World(process=ProcessRank(), device=torch.device("cpu")))
    if text == "batchnorm=sync":  # which several processes have; its group is for training alone
        synchronise_batchnorm(model, cast("ProcessGroup", object()))
    best = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in best.parameters():
            parameter.zero_()
        assert best(torch.ones(3, 4)).abs().sum() == 0
        assert model.eval()(torch.ones(3, 4)).abs().sum() > 1


class Named(dict):
    """An output that cannot be made of its entries again."""

    def __init__(self, only: Tensor) -> None:
        super().__init__({0: only})


def test_a_replicas_output_is_the_models_own_where_no_sample_is_cut() -> None:
    world = World(process=ProcessRank(), device=torch.device("cpu"))
    carrier = SumsCarrier(nn.Identity(), world, lambda model, inputs: Named(model(inputs)), 0, torch.float32)
    output = carrier(torch.ones(2))
    assert type(output) is Named and output[0].tolist() == [1.0, 1.0]
