"""The gradient's norm is that of one process wherever its parts are, and clipping is torch's, scaled or not."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from grappe.launch.rank import ProcessRank
from grappe.launch.world import joined
from grappe.plan import Plan
from grappe.step.clip import clipping, gradient_norm
from grappe.step.precision import LossScale
from grappe.task import Task
from tests.processes import Pool


class Clipped(Task):
    """Task with a bound on the gradient's norm."""

    clip: float | None = None


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))


def norm(net: nn.Module) -> float:
    net(torch.arange(12.0).view(2, 6)).sum().backward()
    return float(gradient_norm(list(net.parameters())))


def norm_in_parts(place: ProcessRank, meet: Path, plan: str) -> float:
    """The norm where the first layer is split over the tensor axis, and all is sharded."""
    with joined(parsed := Plan.parse(plan), place, Path(meet)) as world:
        net = model()
        assert world.mesh is not None
        if parsed.tensor > 1:
            parallelize_module(net[0], world.mesh["tensor"], ColwiseParallel(output_layouts=Replicate()))
        fully_shard(net, mesh=world.mesh["shard"])
        net.set_gradient_divide_factor(1.0)
        net.set_force_sum_reduction_for_comms(True)
        return norm(net) / parsed.shard  # each has the whole batch


@pytest.mark.parametrize(("plan", "size"), [("shard=2", 2), ("shard=2,tensor=2", 4)])
def test_the_norm_of_parts_is_that_of_the_whole(pool: Pool, plan: str, size: int) -> None:
    norms = pool.run("tests.step.test_clip:norm_in_parts", size, f"{plan},device=cpu,threads=1")
    assert norms == pytest.approx([norm(model())] * size, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("bound", [0.5, 1e9])
def test_a_scaled_gradient_is_clipped_as_torch_clips_the_gradient(precision: str, bound: float) -> None:
    loss_scale, alone, scaled = LossScale(precision), model(), model()
    expected = norm(alone)
    nn.utils.clip_grad_norm_(alone.parameters(), bound)
    parameters = list(scaled.parameters())
    (scaled(torch.arange(12.0).view(2, 6)).sum() * loss_scale.value).backward()
    clip = clipping(Clipped(clip=bound), Plan(), loss_scale, parameters, lambda: gradient_norm(parameters))
    assert clip is not None
    before, skipped = clip()
    assert float(before) == pytest.approx(expected, rel=1e-6)
    assert not skipped
    for ours, theirs in zip(parameters, alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_an_infinity_skips_the_step_in_fp16_alone() -> None:
    for precision, is_skipped in (("fp32", False), ("fp16", True)):
        loss_scale, weight = LossScale(precision), nn.Parameter(torch.ones(2))
        weight.grad = torch.tensor([1.0, torch.inf])
        clip = clipping(Clipped(clip=1.0), Plan(), loss_scale, [weight], lambda weight=weight: gradient_norm([weight]))
        assert clip is not None
        _, skipped = clip()
        assert skipped == is_skipped
