"""The textbook engine's own parts: its all-reduces, and gradients that not every process has."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Task
from grappe.checkpoint.initial import built
from grappe.data.loader import training_loader
from grappe.engines import textbook
from grappe.engines.base import EngineSetup
from grappe.engines.textbook import Textbook, naive_all_reduce, ring_all_reduce
from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.plan import Plan
from tests.processes import Pool

LENGTHS = (0, 1, 2, 3, 1000)
ALL_REDUCES = {"naive": naive_all_reduce, "ring": ring_all_reduce}


def vector_of(rank: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * rank + length))


def all_reduced(process: ProcessRank, rendezvous_folder: Path) -> dict[tuple[str, int], Tensor]:
    """Every vector of LENGTHS, summed in both ways; run on several processes."""
    world = join(Plan(replicate=process.size, device="cpu", threads=1), process, rendezvous_folder)
    sums = {}
    for name, all_reduce in ALL_REDUCES.items():
        for length in LENGTHS:
            vector = vector_of(process.rank, length)
            all_reduce(vector, process.rank, process.size)
            sums[name, length] = vector
    world.leave()
    return sums


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_is_the_sum_and_the_same_bits_everywhere(pool: Pool, size: int) -> None:
    found = pool.run(f"{__name__}:all_reduced", size)
    for name in ALL_REDUCES:
        for length in LENGTHS:
            wanted = torch.stack([vector_of(rank, length) for rank in range(size)]).sum(0)
            torch.testing.assert_close(found[0][name, length], wanted, rtol=1e-6, atol=1e-6)
            for other in found[1:]:
                assert torch.equal(other[name, length], found[0][name, length]), (name, length)


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_one_process_has_its_sum_already(name: str) -> None:
    vector = vector_of(0, 5)
    ALL_REDUCES[name](vector, 0, 1)
    assert torch.equal(vector, vector_of(0, 5))


class Switch(nn.Module):
    """Sends a sample to one of two experts, by the sign of its first number; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output = torch.zeros(len(x), 2)
        for expert, chosen in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=False):
            if chosen.any():
                output[chosen] = expert(x[chosen])
        return output


class Switched(Task):
    """Five samples of which the last goes to the second expert, so that few processes reach it."""

    epochs: int = 3
    batch_size: int = 5
    clip: float | None = 0.1

    def model(self) -> nn.Module:
        return Switch()

    def data(self, split: str, folder: Path) -> Arrays:
        inputs = torch.rand(5, 3, generator=torch.Generator().manual_seed(1)) + 0.1
        inputs[4, 0] = -1.0
        return Arrays(inputs, torch.tensor([0, 1, 0, 1, 0]))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.AdamW(named_parameters, lr=0.1, weight_decay=0.5)


def trained(
    process: ProcessRank, rendezvous_folder: Path, all_reduce: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], list]:
    """Weights before and after training, and the steps' sums; run on several processes."""
    plan = Plan(engine="textbook", replicate=process.size, device="cpu", threads=1)
    world = join(plan, process, rendezvous_folder)
    task = Switched()
    loader = training_loader(task, task.data("train", Path()), plan, world)
    setup = EngineSetup(task=task, plan=plan, world=world, weights=built(task), total_steps=3)
    setup.stop.flag = process.rank + 1.0
    with mock.patch.object(textbook, "ring_all_reduce", ALL_REDUCES[all_reduce]):
        engine = Textbook(setup)
    before = {name: tensor.clone() for name, tensor in engine.train_state.export()}
    results = []
    engine.train(loader.batches(0, 3), lambda result: bool(results.append(result)))
    after = {name: tensor.clone() for name, tensor in engine.train_state.export()}
    engine.close()
    world.leave()
    return before, after, [result.sums.read() for result in results]


@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
def test_parameters_that_only_some_processes_reach(pool: Pool, all_reduce: str) -> None:
    [(before, alone, sums)] = pool.run(f"{__name__}:trained", 1, "ring")
    found = pool.run(f"{__name__}:trained", 4, all_reduce)  # one process has an empty slice
    for name, tensor in alone.items():
        assert torch.equal(tensor, before[name]) == name.startswith("experts.2"), name
        for _, after, _ in found:
            torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-6)
            assert torch.equal(after[name], found[0][1][name])
    for _, _, steps in found:
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in sums], rel=1e-6)
        assert [flag for _, flag in steps] == [1 + 2 + 3 + 4] * 3
