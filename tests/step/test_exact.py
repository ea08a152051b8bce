"""Exact sums have one set of bits on any number of processes: of gradients, loss and dropout's numbers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from grappe.data.batch import ExactPieces
from grappe.launch.rank import ProcessRank
from grappe.launch.world import joined
from grappe.plan import Plan
from grappe.step.exact import exact_sums, tree_sum
from tests.processes import Pool

PIECES = 8


def numbers(*size: int) -> Tensor:
    """Numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, generator=generator) * 10.0 ** torch.randint(-4, 4, size, generator=generator)


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_subtrees_of_neighbours_are_parts_of_the_tree(processes: int) -> None:
    rows = numbers(PIECES, 1000)
    subtrees = torch.stack([tree_sum(part) for part in rows.chunk(processes)])
    assert torch.equal(tree_sum(subtrees), tree_sum(rows))


def summed(place: ProcessRank, meet: Path, plan: str) -> list[bytes]:
    """The bits of a step's gradient and loss, by a model with dropout."""
    parsed = Plan.parse(plan)
    with joined(parsed, place, Path(meet)) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 3))
        inputs = numbers(PIECES, 2, 50)
        exact = exact_sums(model, list(model.parameters()), parsed, world, lambda model, inputs: model(inputs))
        for index, piece in enumerate(ExactPieces.of(parsed).places(world.data_rank)):
            with exact.piece(index, step=3, seed=5):
                loss = exact.forward(inputs[piece]).square().sum()
                loss.backward()
            exact.add(loss.detach())
        sums = exact.reduce(0.0, 2 * PIECES)
        gradients = [parameter.grad.numpy().tobytes() for parameter in model.parameters() if parameter.grad is not None]
        return [*gradients, torch.tensor(sums.read()[0]).numpy().tobytes()]


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_has_the_bits_of_one_process(pool: Pool, size: int) -> None:
    name, common = "tests.step.test_exact:summed", f"exact={PIECES},device=cpu,threads=1"
    [alone] = pool.run(name, 1, common)
    assert len(alone) == 3
    assert pool.run(name, size, f"replicate={size},{common}") == [alone] * size
