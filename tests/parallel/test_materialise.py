"""Memory of a model with offload: sharded parameters on the host, all else on the device.

The meta device stands in for the GPU, as this machine has none: no value is computed there.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import grappe
from grappe.checkpoint.weights import InMemory, named_tensors
from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.parallel.materialise import fill, give_memory, on_meta, shared_parameters, untied
from grappe.parallel.shard import shard
from grappe.plan import Plan
from grappe.task import Task
from grappe.verbs.verify.verify import verify
from tests.foresight import unusual
from tests.foresight.unusual import Tied
from tests.parallel.test_shard import Scaled
from tests.processes import Pool


def placed(process: ProcessRank, rendezvous_folder: Path) -> dict[str, tuple[str, bool]]:
    """Returns, by name, the device of each tensor, and whether it is sharded."""
    world = join(plan := Plan.parse("offload=cpu,device=cpu"), process, rendezvous_folder)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scaled(), nn.Linear(4, 4, bias=False))
        model[3].weight = model[0].weight
    shard(model, [], plan, world)
    give_memory(model, torch.device("meta"), offloaded=True)
    assert model[3].weight is model[0].weight
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    world.leave()
    return {name: (tensor.device.type, isinstance(tensor, DTensor)) for name, tensor in found.items()}


def test_offloaded_parameters_have_their_memory_on_the_host(pool: Pool) -> None:
    [found] = pool.run("tests.parallel.test_materialise:placed", 1)
    sharded = {name for name, (_, is_sharded) in found.items() if is_sharded}
    assert sharded == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert {found[name][0] for name in sharded} == {"cpu"}
    assert {found[name][0] for name in found.keys() - sharded} == {"meta"}
    assert {"1.running_mean", "1.num_batches_tracked", "2.scale"} <= found.keys() - sharded


def test_fsdp_keeps_the_device_that_a_parameter_was_made_on(pool: Pool) -> None:
    """Tests why: a parameter whose part is replaced by one on the host says the other device, and is refused."""
    assert pool.run("tests.parallel.test_materialise:replaced", 1) == [("meta", "cpu")]


def replaced(process: ProcessRank, rendezvous_folder: Path) -> tuple[str, str]:
    """Returns a sharded parameter's device, and its part's, after the part was replaced as FSDP2 does it."""
    world = join(plan := Plan.parse("offload=cpu,device=cpu"), process, rendezvous_folder)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    shard(model, [], plan, world)
    parameter = model.weight
    assert isinstance(parameter, DTensor)
    parameter._local_tensor = torch.empty(4, 4)
    world.leave()
    return parameter.device.type, parameter._local_tensor.device.type


def test_units_that_share_with_others_are_left_out() -> None:
    model = Tied().model()
    units = Tied().units(model)
    assert untied(model, units) == [units[1]]
    first, last = (next(iter(unit.children())) for unit in (units[0], units[2]))
    assert shared_parameters(model) == {id(first.weight): {id(first), id(last)}}
    unit = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    unit[1].weight = unit[0].weight
    model = nn.Sequential(unit, nn.Linear(4, 4))
    assert untied(model, list(model)) == list(model)
    common, own = nn.Linear(4, 4), nn.Linear(4, 4)
    one, two, three = nn.Sequential(common), nn.Sequential(common, nn.Tanh()), nn.Sequential(own)
    model = nn.Sequential(one, two, three, three)
    assert untied(model, [one, two, three]) == [three]
    assert untied(model, [one, three, three]) == [one]
    inner = nn.Sequential(nn.Linear(4, 4))
    outer = nn.Sequential(inner, nn.Linear(4, 4))
    assert untied(nn.Sequential(outer), [inner, outer]) == [inner, outer]


@pytest.mark.parametrize("task", [unusual.Common, unusual.Repeated])
@pytest.mark.parametrize("plan", ["shard=2", "shard=2,zero=1", "offload=cpu"])
def test_units_with_a_common_module_learn_as_one_process_does(task: type[Task], plan: str) -> None:
    [found] = verify(task(), [f"{plan},threads=1"], steps=3)
    assert found.verdict == "same"


@pytest.mark.parametrize(
    "plan", ["shard=2", "shard=2,zero=1,microbatches=2", "replicate=2,shard=2,recompute", "offload=cpu"]
)
def test_tied_units_learn_as_one_process_does(plan: str) -> None:
    [found] = verify(Tied(), [f"{plan},threads=1"], steps=3)
    assert found.verdict == "same"


class Marked(unusual.Rows):
    """A parameter with an attribute of the task's, and a gradient that a hook of model() stops."""

    hooks: bool = False

    def model(self) -> nn.Module:
        model = super().model()
        first = next(model.parameters())
        first.no_decay = True  # type: ignore[attr-defined]
        if self.hooks:
            first.register_hook(lambda gradient: gradient * 0)
        return model


@pytest.mark.parametrize("hooks", [False, True])
def test_attributes_and_hooks_of_parameters_stay(hooks: bool) -> None:
    """Parameters of the meta device are replaced, which dropped both without a message."""
    task = Marked(hooks=hooks)
    model, plain = on_meta(task), task.model()
    fill(model, InMemory(named_tensors(plain)), torch.device("cpu"))
    first = next(model.parameters())
    assert first.no_decay  # type: ignore[attr-defined]
    sum(each.sum() for each in model.parameters()).backward()
    assert bool(first.grad.any()) is not hooks  # type: ignore[union-attr]


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "microbatches=2", "engine=textbook,replicate=2"])
def test_a_hook_that_would_see_a_part_of_the_gradient_is_refused(plan: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"model\(\) has put a hook on the gradient of \S+, which would see a part"):
        grappe.train(Marked(hooks=True), f"{plan},device=cpu,threads=1", tmp_path / "run")
    grappe.train(Marked(epochs=1), f"{plan},device=cpu,threads=1", tmp_path / "other")
