"""Sharding: when gradients are reduced, and scalar parameters, which stay whole and learn as on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import joined
from grappe.parallel.parallelize import prepare_made
from grappe.parallel.shard import SameParameters, reduction_switch, shard
from grappe.plan import Plan
from grappe.verbs.verify.verify import verify
from tests.parity import planted
from tests.parity.tasks import Images
from tests.processes import Pool


class Scaled(nn.Module):
    """Multiplies by a scalar, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Logits(Images):
    """Images, with a scalar in a unit and one in the root."""

    samples: int = 64
    clip: float | None = 0.5

    def model(self) -> nn.Module:
        return super().model().append(Scaled()).append(nn.Sequential(Scaled()))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model)


class Flattened(nn.LSTM):
    """Moves its weights to one piece of memory, as cuDNN does on a GPU: a stand-in for it."""

    def flatten_parameters(self) -> None:
        weights: Any = getattr(self, "_flat_weights", [])
        if any(type(weight) is not nn.Parameter or weight.is_meta for weight in weights):
            return
        with torch.no_grad():
            sizes = [weight.numel() for weight in weights]
            for weight, part in zip(weights, torch.cat([w.flatten() for w in weights]).split(sizes), strict=True):
                weight.data = part.view(weight.shape)


class Recurrent(Images):
    """Images, read row by row by an LSTM."""

    def model(self) -> nn.Module:
        class Network(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm, self.head = Flattened(8, 16, batch_first=True), nn.Linear(16, 10)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.lstm(x.flatten(1)[:, :64].unflatten(1, (8, 8)))[0][:, -1])

        return Network()

    def units(self, model: nn.Module) -> list[nn.Module]:
        return []


@pytest.mark.parametrize("plan", ["shard=2", "shard=2,zero=1"])
def test_an_lstm_reads_the_gathered_weights_of_each_step(pool: Pool, plan: str) -> None:
    """A GPU's first step was right, and every later one computed with the weights of the first."""
    [found] = verify(Recurrent(), [f"{plan},threads=1"], run=planted.runner(pool))
    assert found.verdict == "same", found


PLANS = """
shard=2 shard=2,zero=1,microbatches=2 shard=2,microbatches=3,recompute replicate=2,shard=2 shard=3 exact=4,shard=2
exact=8,shard=4 shard=2,offload=cpu shard=2,pipeline=2,microbatches=2 engine=lightning,shard=2
shard=2,zero=1,pipeline=2,microbatches=4,schedule=zero_bubble
"""


@pytest.mark.parametrize("plan", PLANS.split())
def test_scalars_learn_the_same(pool: Pool, plan: str) -> None:
    if "lightning" in plan:
        pytest.importorskip("lightning")
    task = Logits(rule="adam")
    [found] = verify(task, [f"{plan},threads=1"], run=planted.runner(pool))
    assert found.verdict == "same", found


def test_deepspeed_names_them(pool: Pool) -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(AssertionError, match=r"takes no scalar parameter, and the model has 4\.scale, 5\.0\.scale"):
        list(verify(Logits(), ["engine=deepspeed,shard=2,threads=1"], run=planted.runner(pool)))


class Branches(nn.ModuleDict):
    def forward(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self[name](value)


def branches_taken(place: ProcessRank, meet: Path, microbatches: str) -> list[str]:
    """Refusals after each step of backwards through the layers that `microbatches` names: here/there of a step."""
    with joined(Plan.parse("shard=2,device=cpu,threads=1"), place, Path(meet)) as world:
        model = Branches({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        shard(model, [], Plan.parse("shard=2"), world)
        check, said = SameParameters(list(model.named_parameters()), world), list[str]()
        for step in microbatches.split():
            for name in step.split("/")[place.rank]:
                model(name, torch.ones(1, 2)).sum().backward()
            try:
                check()
                said.append("")
            except TaskError as error:
                said.append(str(error).partition(":")[0])
        return said


def test_a_branch_that_other_processes_do_not_take_is_named_in_its_step(pool: Pool) -> None:
    """FSDP2 would add one layer's gradients to the other's of the same size; in turned microbatches as well."""
    said = "a.weight has a gradient on some processes, and not on others"
    found = pool.run("tests.parallel.test_shard:branches_taken", 2, "a/a ab/ab a/b a/a ab/ba")
    assert found == [["", "", said, "", said]] * 2


def gradients_by_microbatch(place: ProcessRank, meet: Path, plan: str) -> list[float | None]:
    """The sum of this process's part of the gradient after each of three microbatches; None: there is none yet."""
    parsed = Plan.parse(plan)
    with joined(parsed, place, Path(meet)) as world:
        model, sums = nn.Sequential(nn.Linear(3, 4, bias=False)), list[float | None]()
        shard(model, [], parsed, world)
        switch = reduction_switch(model, parsed)
        for number in range(3):
            if switch is not None:
                switch(number == 2)
            model(torch.full((1, 3), place.rank + 1.0)).sum().backward()
            [gradient] = [parameter.grad for parameter in model.parameters()]
            sums.append(None if gradient is None else float(gradient.to_local().sum()))  # type: ignore[operator]
        return sums


@pytest.mark.parametrize(
    ("zero", "expected"), [(1, [None, None, 54.0]), (2, [18.0, 36.0, 54.0]), (3, [18.0, 36.0, 54.0])]
)
def test_whole_gradients_stay_between_microbatches_with_stage_1_alone(
    pool: Pool, zero: int, expected: list[float | None]
) -> None:
    plan = f"shard=2,zero={zero},microbatches=3,device=cpu,threads=1"
    assert pool.run("tests.parallel.test_shard:gradients_by_microbatch", 2, plan) == [expected] * 2


def gradients_of_a_loop(place: ProcessRank, meet: Path, plan: str) -> list[float]:
    """Of a hand-written loop's model, in which a scalar multiplies a matrix of ones."""
    parsed = Plan.parse(plan)
    with joined(parsed, place, Path(meet)) as world:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), Scaled())
        nn.init.ones_(model[0].weight)
        prepare_made(model, [], parsed, world)
        model(torch.full((1, 2), place.rank + 1.0)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return [float((grad.full_tensor() if isinstance(grad, DTensor) else grad).sum()) for grad in gradients]


def test_a_loops_gradients_are_sums_of_scalars_too(pool: Pool) -> None:
    """Each process hands over its term of a gradient: rows make no mean of processes."""
    plan = "shard=2,device=cpu,threads=1"
    assert pool.run("tests.parallel.test_shard:gradients_of_a_loop", 2, plan) == [[18.0, 12.0]] * 2


class Fourier(nn.Module):
    """Complex weights, beside which a unit has those of other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(inputs, n=6) @ self.weight, n=4)


class Twice(nn.Linear):
    """Parameters of two types."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))


def sharded_as(place: ProcessRank, meet: Path, middle: str) -> list[str] | str:
    """Names of the modules that FSDP2 gathers, after a step with a finite loss; or what is refused."""
    parsed = Plan.parse("shard=2,device=cpu,threads=1")
    with joined(parsed, place, Path(meet)) as world:
        makes = {"complex": Fourier, "two": Twice, "sparse": lambda: nn.Embedding(3, 4, sparse=True)}
        makes["scripted"] = lambda: torch.jit.script(nn.Linear(4, 4))  # type: ignore[assignment]
        makes["listed"] = lambda: nn.Linear(4, 4)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(makes[middle]()), nn.Linear(4, 4))
        try:
            shard(nn.ModuleList(model) if middle == "listed" else model, [], parsed, world)
        except TaskError as error:
            return str(error)
        model(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        ("complex", ["", "1.0"]),
        ("two", "1.0 has parameters of torch.float32 and torch.float64, which shard= cannot gather at once"),
        ("sparse", "1.0 has sparse gradients, which shard= cannot cut into pieces"),
        ("scripted", "1.0 is made by torch.jit.script, which shard= cannot cut into pieces"),
        ("listed", "ModuleList has no forward of its own, before which shard= gathers parameters"),
    ],
)
def test_what_is_of_another_kind_is_gathered_apart_or_refused(pool: Pool, middle: str, expected: Any) -> None:
    for found in pool.run("tests.parallel.test_shard:sharded_as", 2, middle):
        assert found == expected if isinstance(expected, list) else found.startswith(expected), found


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm, read as a number, as many optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(float(parameter.grad.norm()) + parameter.detach().abs().max().item())
        return super().step(closure)


class Norms(Images):
    def optimizer(self, named_parameters):
        return Normed(named_parameters, lr=0.1)


def test_a_number_of_a_sharded_tensor_is_of_all_its_parts(pool: Pool) -> None:
    """torch reads this process's term."""
    [found] = verify(Norms(), ["shard=2,threads=1"], run=planted.runner(pool))
    assert found.verdict == "same", found


class Factored(Images):
    def optimizer(self, named_parameters):
        return torch.optim.Adafactor((parameter for _, parameter in named_parameters), lr=0.1)


def test_an_optimizer_without_rules_for_parts_is_refused(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="Adafactor cannot step parameters of which each process holds a part"):
        verify(Factored(), ["shard=2,threads=1"], run=planted.runner(pool))
