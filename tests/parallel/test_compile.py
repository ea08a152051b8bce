"""Tests of compilation with CUDA graphs. No GPU is here: torch's compiler and its mark of a step are stand-ins."""

from pathlib import Path

import pytest
import torch
from torch import nn

from grappe import Arrays, Task, engines
from grappe.checkpoint.initial import built
from grappe.data.loader import evaluation_loader, training_loader
from grappe.engines.base import EngineSetup
from grappe.errors import PlanError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World, choose_device
from grappe.parallel import compile as compilation
from grappe.plan import Plan

ALONE = World(process=ProcessRank(), device=torch.device("cpu"))
GRAPHS = Plan.parse("compile,cuda_graphs")


class Two(Task):
    """Two units, and five samples of which three make a batch."""

    batch_size: int = 3

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def data(self, split: str, folder: Path) -> Arrays:
        draw = torch.Generator().manual_seed(1)
        return Arrays(torch.randn(5, 4, generator=draw), torch.randn(5, 2, generator=draw))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean(dim=1)

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)


FORWARDS = 4
"""The first step's is watched once without compilation; two steps; one evaluation."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records each unit's compilation, each mark of a step and each forward of the first unit."""
    found: list[str] = []
    monkeypatch.setattr(nn.Linear, "compile", lambda self, mode: found.append(f"compile {mode}"), raising=False)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: found.append("mark"))
    forward = nn.Linear.forward

    def record(self: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        if self.out_features == 4:
            found.append("forward")
        return forward(self, inputs)

    monkeypatch.setattr(nn.Linear, "forward", record)
    return found


def trained(plan: Plan) -> None:
    """Trains both steps of an epoch and evaluates, on the CPU."""
    task, world = Two(), ALONE
    setup = EngineSetup(task=task, plan=plan, world=world, weights=built(task), total_steps=2)
    engine = engines.check(plan)(setup)
    data = task.data("train", Path())
    engine.train(training_loader(task, data, plan, world).batches(0, 2), lambda _: False)
    loader = evaluation_loader(task, data, plan, world)
    engine.evaluate(loader.batches(0, 1), 5)
    engine.close()


def test_each_forward_begins_a_step_of_graphs(calls: list[str]) -> None:
    trained(GRAPHS)
    assert calls == ["compile reduce-overhead"] * 2 + ["mark", "forward"] * FORWARDS


def test_without_graphs_no_step_is_marked(calls: list[str]) -> None:
    trained(Plan.parse("compile"))
    assert calls == ["compile None"] * 2 + ["forward"] * FORWARDS


def test_what_an_evaluation_keeps_is_a_copy() -> None:
    memory = torch.zeros(2)
    nested = {"logits": memory, "name": "a"}
    copied = compilation.replaying(lambda _: nested, keeps=True)(None)
    assert copied["logits"].data_ptr() != memory.data_ptr()
    assert copied["name"] == "a"
    assert compilation.replaying(lambda _: memory, keeps=False)(None) is memory


def test_graphs_are_of_kernels_on_a_gpu() -> None:
    with pytest.raises(PlanError, match="runs on the CPU"):
        choose_device(Plan.parse("device=cpu,compile,cuda_graphs"), ALONE.process)


def test_functions_without_a_graph_are_remarked(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters, "inductor", {"cudagraph_skips": 3})
    assert compilation.remarks(GRAPHS) == ("3 compiled functions without a CUDA graph; TORCH_LOGS=cudagraphs says why",)
    assert compilation.remarks(Plan.parse("compile")) == ()
