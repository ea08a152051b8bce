"""Replicas: gradients and the step's sums are reduced, whichever parameters a step reaches on a process."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grappe.launch.rank import ProcessRank
from grappe.launch.world import joined
from grappe.parallel.replicate import Replicas
from grappe.plan import Plan
from grappe.step.loss import LossReduction
from tests.processes import Pool


class Branch(torch.autograd.Function):
    """A layer's product whose gradient of the weight is None for a process, though the graph has it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        return inputs * weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Branches(nn.Module):
    """Layers of which a step reaches some, each in another thread if asked."""

    def __init__(self, threads: bool) -> None:
        super().__init__()
        self.map = ThreadPoolExecutor(2).map if threads else map
        self.layers = nn.ModuleDict({name: nn.Linear(2, 1) for name in "abc"})

    def forward(self, reached: str) -> Tensor:
        inputs = torch.ones(1, 2)
        names = [name for name in reached if name != "0"]
        out = torch.stack(list(self.map(lambda name: self.layers[name](inputs), names))).sum(0)
        return Branch.apply(out, self.layers["c"].bias) if "0" in reached else out


# Layers that each of two processes reaches in the microbatches of a step; "0": c's bias gets None from the graph.
STEPS = {
    "all": [("abc", "abc"), ("abc", "abc")],
    "never": [("ab", "ab"), ("ab", "ab")],
    "later": [("abc", "abc"), ("a", "ab"), ("a", "b"), ("abc", "abc"), ("c", "c")],
    "in the graph": [("ab0", "ab0"), ("abc", "ab0"), ("ab0", "ab"), ("abc", "a0")],
    "by microbatch": [("abc|a", "b|a"), ("c|ab", "c|ab"), ("c|a0", "a|a")],
    "frozen": [("abc", "abc"), ("-abc", "-abc"), ("-ab", "-abc"), ("abc", "abc")],
}


def stepped(place: ProcessRank, meet: Path, kind: str, threads: bool = False) -> list[Any]:
    """By step, gradients of the biases by layer, and the sums."""
    with joined(Plan.parse("replicate=2,device=cpu,threads=1"), place, Path(meet)) as world:
        model, results = Branches(threads), list[Any]()
        replicas = Replicas(
            model, world, lambda model, inputs: model(inputs), microbatches=2 if "|" in str(STEPS[kind]) else 1
        )

        def dry_run(forward: Any, reduction: LossReduction) -> None:
            backward(forward, STEPS[kind][0][place.rank].split("|")[0], reduction, 0.0)
            reduction.sums()

        def backward(forward: Any, reached: str, reduction: LossReduction | None, flag: float) -> None:
            output = forward(reached)
            loss = torch.tensor(place.rank + 10.0)
            roots, gradients = reduction.start(loss, flag, output) if reduction else ((), ())
            torch.autograd.backward((output, *roots), (torch.full_like(output, place.rank + 1.0), *gradients))

        for _ in range(100 * threads):  # so that the nodes of other threads are older
            torch.ones(1, requires_grad=True).sum()
        reduction = replicas.wrap(dry_run)
        for step, ways in enumerate(STEPS[kind]):
            frozen, micros = ways[place.rank].startswith("-"), ways[place.rank].lstrip("-").split("|")
            model.layers["c"].requires_grad_(not frozen)
            for parameter in model.parameters():
                parameter.grad = None
            for number, reached in enumerate(micros):
                last = number == len(micros) - 1
                replicas.reduce_in_next_backward(last)
                backward(replicas, reached, reduction if last else None, float(step))
            sums = reduction.sums().read()
            biases = {name: layer.bias.grad for name, layer in model.layers.items()}
            results.append(({name: None if grad is None else grad.item() for name, grad in biases.items()}, sums))
        return results


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("kind", STEPS)
def test_steps_reduce_what_is_reached(pool: Pool, kind: str, threads: bool) -> None:
    expected = []
    for step, ways in enumerate(STEPS[kind]):
        biases: dict[str, float | None] = {}
        for name in "abc":
            # DDP averages; the gradient of a process is its number, once for each time that it reaches the layer.
            terms = [
                (rank + 1.0) / 2
                for rank, way in enumerate(ways)
                for _ in range(way.count(name))
                if "-" not in way or name != "c"
            ]
            biases[name] = sum(terms) if terms else None
        expected.append((biases, [21.0, 2.0 * step]))
    assert pool.run("tests.parallel.test_replicate:stepped", 2, kind, threads) == [expected] * 2
