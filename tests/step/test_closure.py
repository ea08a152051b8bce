"""Tests of which optimizers get a closure, and of the plans that refuse one."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from grappe.data.batch import Batch, Microbatch
from grappe.errors import UsageError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.plan import Plan
from grappe.step.closure import ClosureStep, copies_of, needs_closure, wrapped
from grappe.step.loss import Sums
from grappe.step.noise_scale import NoiseScale
from grappe.step.observers import Observers
from tests.parity.optimizers import SAM, TunedTokens
from tests.processes import Pool


class Required(torch.optim.SGD):
    """An optimizer whose step cannot be called without a closure."""

    def step(self, closure):
        return super().step(closure)


class Wrapper(torch.optim.Optimizer):
    """Wraps another, and needs no closure."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_that_needs_a_closure_is_recognised() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    for made in (torch.optim.LBFGS(weights), SAM(weights, torch.optim.SGD, lr=0.1), Required(weights, lr=0.1)):
        assert needs_closure(made), type(made)
    plain = torch.optim.Adam(weights)
    assert not needs_closure(plain)
    assert not needs_closure(Wrapper(plain))
    torch.optim.lr_scheduler.StepLR(plain, 1)  # which replaces `step` by its own
    assert not needs_closure(plain)
    plain.needs_closure = True
    assert needs_closure(plain)


def test_a_wrapped_optimizer_is_saved_once() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    sam = SAM(weights, torch.optim.SGD, lr=0.1)
    assert wrapped(sam) == {"": sam, "base_optimizer": sam.base_optimizer}
    sam.state = sam.base_optimizer.state
    assert wrapped(sam) == {"": sam}


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("engine=textbook", "returned SAM, which computes several gradients a step by a closure"),
        ("engine=lightning", "returned SAM, which computes several gradients a step by a closure"),
        ("precision=fp16", "precision=fp16 skips steps whose gradient overflows, and SAM computes several"),
        ("pipeline=2,microbatches=2", "SAM computes several gradients a step by a closure, and looks at all"),
    ],
)
def test_a_plan_that_cannot_call_a_closure_refuses_it_by_name(pool: Pool, plan: str, says: str) -> None:
    processes = 2 if "pipeline" in plan else 1
    for told in pool.run("tests.engines.told:told", processes, TunedTokens(by="sam"), plan, 1):
        assert says in told


def test_the_noise_scale_has_no_place_for_several_gradients() -> None:
    noise = NoiseScale(data_size=2, batch_size=4, short_step=None, steps_per_epoch=1, start=0)
    weights = [("weight", nn.Parameter(torch.ones(2)))]
    with pytest.raises(UsageError, match="LBFGS computes several gradients a step"):
        noise.on_optimizer(torch.optim.LBFGS(weights), weights)


def gradients(process: ProcessRank, rendezvous_folder: Path) -> list[list[float]]:
    """Whole copies' gradients under tensor=2, where each process has computed another one for what is not split."""
    world = join(Plan.parse("tensor=2,threads=1,device=cpu"), process, rendezvous_folder)
    split = nn.Parameter(distribute_tensor(torch.zeros(2), world.mesh["tensor"], [Shard(0)]))
    split.grad = distribute_tensor(torch.tensor([3.0, 4.0]), world.mesh["tensor"], [Shard(0)])
    unsplit = nn.Parameter(torch.zeros(1))
    unsplit.grad = torch.tensor([1.0 + process.rank * 1e-6])  # as sums on a GPU can be
    copies = copies_of([("split", split), ("unsplit", unsplit)], world)
    copies.read_gradients()
    dist.destroy_process_group()
    return [copy.grad.tolist() for _, copy in copies.named if copy.grad is not None]


def test_all_processes_of_the_tensor_axis_search_with_the_same_gradients(pool: Pool) -> None:
    assert pool.run("tests.step.test_closure:gradients", 2) == [[[3.0, 4.0], [1.0]]] * 2


def test_an_observer_sees_a_batch_once_however_often_its_loss_is_computed() -> None:
    weight, seen, losses = nn.Parameter(torch.tensor([3.0])), [], []
    observers = Observers(output=[lambda output, micro, named: seen.append(float(output.detach()))])
    micro = Microbatch(None, None, 1, None)

    def gradients() -> tuple[Sums, None]:
        loss = weight.square().sum()
        loss.backward()
        losses.append(float(loss.detach()))
        observers.after_loss(loss, micro, {})
        return Sums(loss.detach(), flag=0.0), None

    optimizer = torch.optim.LBFGS([weight], lr=0.1, max_iter=4)
    step, batch = ClosureStep(optimizer, [weight], observers, None), Batch(0, 0, (micro,), 1, 1.0, np.arange(1))
    for _ in range(2):
        sums, _ = step(gradients, batch)
        assert sums.read()[0] == seen[-1]
    assert len(losses) > len(seen) == 2
