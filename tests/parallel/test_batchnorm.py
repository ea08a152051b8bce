"""Synchronised batch normalisation is that of one process with all rows: outputs, gradients, running statistics."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import joined
from grappe.parallel.batchnorm import synchronise_batchnorm
from grappe.plan import Plan
from tests.processes import Pool

SIZES = [5, 3, 1]


def rows() -> Tensor:
    """Rows of which each process has others: their means differ."""
    return torch.randn(sum(SIZES), 4, 2, generator=torch.Generator().manual_seed(0)) + torch.arange(9.0).view(9, 1, 1)


def normalised(layer: nn.Module, inputs: Tensor, weights: Tensor) -> list[Tensor]:
    """Two steps' last output and gradient of the inputs, and the layer's statistics."""
    for _ in range(2):
        inputs = inputs.detach().requires_grad_()
        output = layer(inputs)
        (output * weights).sum().backward()
    assert inputs.grad is not None
    return [output.detach(), inputs.grad, *(buffer.detach() for buffer in layer.buffers())]


def normalised_in_parts(place: ProcessRank, meet: Path, plan: str, momentum: float | None) -> list[Tensor]:
    with joined(Plan.parse(plan), place, Path(meet)) as world:
        layer = nn.BatchNorm1d(4, momentum=momentum)
        assert world.data_group is not None
        synchronise_batchnorm(layer, world.data_group)
        parts = rows().split(SIZES), rows().sin().split(SIZES)
        return normalised(layer, *(part[place.rank] for part in parts))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_it_is_that_of_one_process_with_all_rows(pool: Pool, momentum: float | None) -> None:
    name, plan = "tests.parallel.test_batchnorm:normalised_in_parts", "replicate=3,device=cpu,threads=1"
    by_rank = pool.run(name, 3, plan, momentum)
    output, gradient, *statistics = normalised(nn.BatchNorm1d(4, momentum=momentum), rows(), rows().sin())
    torch.testing.assert_close(torch.cat([part[0] for part in by_rank]), output)
    torch.testing.assert_close(torch.cat([part[1] for part in by_rank]), gradient, atol=1e-5, rtol=1e-4)
    for _, _, *theirs in by_rank:
        torch.testing.assert_close(theirs, statistics)


def branches(place: ProcessRank, meet: Path, plan: str) -> str:
    """The message of a forward that takes a branch by its own rows."""
    with joined(Plan.parse(plan), place, Path(meet)) as world:
        layers = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
        assert world.data_group is not None
        synchronise_batchnorm(layers, world.data_group)
        try:
            layers[place.rank](torch.randn(3, 4))
        except TaskError as error:
            return str(error)
    return ""


def test_another_branch_on_each_process_is_refused(pool: Pool) -> None:
    for number, text in enumerate(pool.run("tests.parallel.test_batchnorm:branches", 2, "replicate=2,device=cpu")):
        assert f"the batch normalisation '{number}' takes statistics of all processes' rows, but another" in text
