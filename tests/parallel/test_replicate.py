"""Replicas: gradients and the step's sums are reduced, whether or not every parameter gets a gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grappe.launch.rank import ProcessRank
from grappe.launch.world import joined
from grappe.parallel.replicate import Replicas
from grappe.plan import Plan
from grappe.step.loss import Roots
from tests.processes import Pool


class Branches(nn.Module):
    """Two layers, of which one may be unused."""

    def __init__(self, *, uses_both: bool) -> None:
        super().__init__()
        self.first, self.second, self.uses_both = nn.Linear(2, 1), nn.Linear(2, 1), uses_both

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(inputs) + self.second(inputs) if self.uses_both else self.first(inputs)


def stepped(place: ProcessRank, meet: Path, plan: str, uses_both: bool) -> list[Any]:
    """By step, which parameters have gradients, the first bias's, and the sums."""
    with joined(Plan.parse(plan), place, Path(meet)) as world:
        model = Branches(uses_both=uses_both)
        replicas, results = Replicas(model, world, lambda model, inputs: model(inputs)), list[Any]()

        def backward(forward: Any, roots: Roots) -> None:
            output = forward(torch.ones(1, 2))
            torch.autograd.backward((output, *roots[0]), (torch.full_like(output, place.rank + 1.0), *roots[1]))

        reduction = replicas.wrap(backward)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            backward(replicas, reduction.start(torch.tensor(place.rank + 10.0), float(step)))
            sums = reduction.sums().read()
            reached = [parameter.grad is not None for parameter in model.parameters()]
            results.append((reached, model.first.bias.grad.item() if model.first.bias.grad is not None else None, sums))
        return results


@pytest.mark.parametrize("uses_both", [True, False])
def test_steps_reduce_what_is_reached(pool: Pool, uses_both: bool) -> None:
    plan = "replicate=2,device=cpu,threads=1"
    found = pool.run("tests.parallel.test_replicate:stepped", 2, plan, uses_both)
    expected = [([True, True, uses_both, uses_both], 1.5, [21.0, 2.0 * step]) for step in range(3)]
    assert found == [expected] * 2
