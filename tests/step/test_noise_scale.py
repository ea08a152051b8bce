"""The noise scale of a model whose gradients' mean and variance are known; and what it says, or refuses."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import grappe
from grappe import Arrays, Plan, Task
from grappe.errors import UsageError
from grappe.profiling.phases import UPDATE
from grappe.step.noise_scale import Noise, NoiseScale, refuse
from grappe.training.options import Options
from grappe.training.watchers.curves import sentence

SAMPLES, WIDTH, SPREAD = 4096, 8, 3.0


class Points(Task):
    """The mean of points around (1, ..., 1): the gradient of a sample is the weight less the point."""

    epochs: int = 2
    batch_size: int = 64
    clip: float | None = 1e-3
    lr: float = 0.0

    def model(self) -> nn.Module:
        model = nn.Linear(1, WIDTH, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(0)
        return Arrays(torch.ones(SAMPLES, 1), 1 + SPREAD * torch.randn(SAMPLES, WIDTH, generator=generator))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (output - target).square().sum(1)

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=self.lr)


def expected() -> float:
    generator = torch.Generator().manual_seed(0)
    points = 1 + SPREAD * torch.randn(SAMPLES, WIDTH, generator=generator)
    return float(points.var(0).sum() / points.mean(0).square().sum())


@pytest.mark.parametrize("plan", ["microbatches=4", "replicate=2", "replicate=2,microbatches=2,precision=bf16"])
def test_a_known_noise_scale(plan: str, tmp_path: Path) -> None:
    options = Options(noise_scale=True, evaluate_every=64)
    run = grappe.train(Points(), f"{plan},device=cpu,threads=1", tmp_path / "run", options=options)
    found = list(run.records("noise"))
    assert [one["step"] for one in found] == [64, 128]
    assert [one["steps"] for one in found] == [63, 64]  # without the first
    assert found[-1]["noise_scale"] == pytest.approx(expected(), rel=0.35)
    assert found[-1]["gradient_square"] == pytest.approx(WIDTH, rel=0.35)  # before clipping


def test_it_changes_no_weight(tmp_path: Path) -> None:
    def steps(name: str, **others) -> list:
        run = grappe.train(
            Points(lr=0.1, epochs=1, batch_size=60), "microbatches=4", tmp_path / name, options=Options(**others)
        )
        return [(one["loss"], one["norm"]) for one in run.records("step")]

    assert steps("with", noise_scale=True) == steps("without")


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("", "give --plan microbatches=2, which changes no result"),
        ("shard=2", "a sharded model has no gradients of slices"),
        ("pipeline=2,microbatches=2", "a sharded model"),
        ("engine=textbook,replicate=2", "use engine=native"),
        ("exact=2,replicate=2", "leave it out"),
        ("microbatches=2,precision=fp16", "use precision=bf16"),
        ("microbatches=2,compile", "leave compile out"),
    ],
)
def test_refused(plan: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        refuse(Points(), Plan.parse(plan))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("scale", "batch_size", "told"),
    [
        (1100.0, 64, "about 1,100 samples; a batch has 64. A larger batch learns almost as much from each sample"),
        (1100.0, 512, "Beyond about 1,100 samples a step more devices bring speed, not progress"),
        (50.0, 512, "More samples a step bring hardly any progress"),
        (-1.0, 64, "cannot be distinguished from chance"),
    ],
)
def test_what_it_says(scale: float, batch_size: int, told: str) -> None:
    assert told in sentence(Noise(steps=9, variance=scale, square=1.0), batch_size)


def test_a_scale_is_a_number_of_json() -> None:
    assert Noise(steps=1, variance=1.0, square=0.0).scale is None
    assert Noise(steps=1, variance=float("nan"), square=1.0).scale is None
    assert json.loads(json.dumps(Noise(steps=1, variance=4.0, square=2.0).scale)) == 2.0


def test_a_step_that_overflows_counts_for_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    meter = NoiseScale(data_size=1, batch_size=2, short_step=None, steps_per_epoch=9, start=0)
    meter.on_optimizer(optimizer, [("weight", parameter)])

    def step(*gradients: float) -> None:
        optimizer.zero_grad()
        for gradient in gradients:
            meter.on_output(None, SimpleNamespace(rows=1), {})  # type: ignore[arg-type]
            (gradient / 2 * parameter).sum().backward()
        meter.on_phase(UPDATE)

    step(1.0, 1.0)  # the first is not measured
    step(1.0, math.inf)
    assert meter.take() is None
    step(1.0, 3.0)
    step(math.nan, 1.0)
    noise = meter.take()
    assert noise.steps == 1
    assert noise.variance == pytest.approx(2.0)
    assert noise.square == pytest.approx(3.0)
