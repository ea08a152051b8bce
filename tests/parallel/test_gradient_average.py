"""Gradients are averaged in each backward: large ones where they are, small ones in buckets, of any branch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from grappe.launch.rank import ProcessRank
from grappe.launch.world import joined
from grappe.parallel.gradient_average import GradientAverage
from grappe.plan import Plan
from tests.processes import Pool

SIZES = {"first": (700, 800), "scalar": (), "small": (3, 5), "half": (4, 4), "unused": (2, 2), "last": (600, 900)}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64 if name == "half" else None))
        for name, size in SIZES.items()
    }


def loss(by_name: dict[str, nn.Parameter], rank: int, turn: int) -> Tensor:
    """A loss whose gradient depends on the process; in the second turn process 1 alone reaches two parameters."""
    names = ["first", "scalar", "half", "last"] if turn == 0 else ["scalar", *(["small", "last"] * (rank == 1))]
    return sum((by_name[name].double().sin() * (rank + 1 + turn)).sum() for name in names)  # type: ignore[return-value]


def averaged(place: ProcessRank, meet: Path, plan: str) -> dict[str, Tensor | None]:
    with joined(Plan.parse(plan), place, Path(meet)) as world:
        by_name = parameters()
        GradientAverage(by_name.values(), world.data_group)
        for turn in range(2):  # the second backward adds to what is there
            loss(by_name, place.rank, turn).backward()
        return {name: each.grad for name, each in by_name.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_backwards_add_up_to_the_mean_over_processes(pool: Pool, size: int) -> None:
    found = pool.run("tests.parallel.test_gradient_average:averaged", size, f"replicate={size},device=cpu,threads=1")
    by_name = parameters()
    for rank in range(size):
        for turn in range(2):
            (loss(by_name, rank, turn) / size).backward()
    for name, parameter in by_name.items():
        for theirs in (each[name] for each in found):
            assert (theirs is None) == (parameter.grad is None) == (name == "unused")
            if parameter.grad is not None:
                torch.testing.assert_close(theirs, parameter.grad)


def averaged_anew(place: ProcessRank, meet: Path, plan: str) -> list[float | None]:
    """The gradients of three weights after a second step, in which process 1 alone reaches the second one."""
    with joined(Plan.parse(plan), place, Path(meet)) as world:
        weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        assert world.data_group is not None
        GradientAverage(weights, world.data_group)
        for reached in (weights[:2], weights[: place.rank + 1]):
            for weight in weights:
                weight.grad = None
            sum((weight * (place.rank + 1)).sum() for weight in reached).backward()  # type: ignore[union-attr]
        return [None if weight.grad is None else float(weight.grad[0]) for weight in weights]


def test_what_a_process_does_not_reach_is_zero_there_and_not_of_an_earlier_step(pool: Pool) -> None:
    name, plan = "tests.parallel.test_gradient_average:averaged_anew", "replicate=2,device=cpu,threads=1"
    assert pool.run(name, 2, plan) == [[1.5, 1.0, None]] * 2
