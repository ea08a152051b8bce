"""The idle share of each pipeline schedule, measured with stages that sleep, beside what it should be.

    python -m benchmarks.bubble [PLAN ...]

A forward takes 0.1 seconds, a gradient of inputs as long, a gradient of weights as long: through grappe's own
engine, with its own messages. The idle share is that of the time from the step's first instruction to its last, over
all processes. Expected, for p processes, m microbatches, v stages a process: (p-1)/(m+p-1) for gpipe and 1f1b
(Huang et al. 2019, "GPipe"), (p-1)/(vm+p-1) for interleaved (Narayanan et al. 2021, "Megatron-LM"), (p-1)/(3m+p-1)
for zero_bubble (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", ZB-H1).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.figures import table
from grappe import Arrays, Task, engines
from grappe.checkpoint.initial import built
from grappe.data.loader import training_loader
from grappe.engines.base import EngineSetup
from grappe.launch import local
from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.parallel.pipeline.rules import stages_each
from grappe.plan import Plan

SECONDS = 0.1
STEPS = 2  # behind one that warms up
PLANS = [
    f"pipeline={p},schedule={schedule},microbatches={m}"
    for p in (2, 3, 4)
    for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")
    for m in (p, 2 * p)
]
busy: list[float] = []


def _sleep(seconds: float) -> None:
    began = time.perf_counter()
    time.sleep(seconds)
    busy.append(time.perf_counter() - began)


class _Inputs(torch.autograd.Function):
    """Sleeps forward, and when the gradient of its inputs is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return gradients[0], None


class _Weight(torch.autograd.Function):
    """Sleeps when the gradient of its weight is asked for."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A unit that takes its time."""

    def __init__(self, seconds: float, first: bool) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1))
        # What the first unit is given has no gradient: something before it needs one, so that it sleeps for that too.
        self.before = nn.Parameter(torch.zeros(1)) if first else None

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta or not torch.is_grad_enabled():
            return x + self.weight
        if self.before is not None:
            x = x + self.before
        return _Inputs.apply(x, self.seconds) + _Weight.apply(self.weight, self.seconds)


class Sleepers(Task):
    """A chain of units of the same cost."""

    epochs: int = STEPS + 1
    units_: int = 2
    seconds: float = SECONDS

    def model(self) -> nn.Module:
        return nn.Sequential(*(Sleeper(self.seconds, number == 0) for number in range(self.units_)))

    def data(self, split: str, folder: Path) -> Arrays:
        return Arrays(torch.zeros(self.batch_size, 1), torch.zeros(self.batch_size))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0] - target).square()

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named_parameters, lr=0.0)

    def units(self, model: Any) -> list[nn.Module]:
        return list(model)

    def cuts(self, stages: int) -> list[int]:
        return list(range(1, stages))


def measured(request: tuple[str, float], process: ProcessRank, rendezvous_folder: Path) -> float:
    """The idle share of a plan's steps, the smaller of two: what else the machine does only adds. Collective."""
    text, seconds = request
    plan = Plan.parse(f"{text},threads=1,device=cpu")
    world = join(plan, process, rendezvous_folder)
    each = stages_each(plan)
    task = Sleepers(units_=plan.pipeline * each, seconds=seconds / each, batch_size=2 * plan.microbatches)
    loader = training_loader(task, task.data("train", rendezvous_folder), plan, world)
    engine = engines.check(plan)(EngineSetup(task=task, plan=plan, world=world, weights=built(task), total_steps=9))
    engine.train(loader.batches(0, 1), lambda result: False)
    shares = []
    for step in range(1, STEPS + 1):
        (batch,) = loader.batches(step, step + 1)
        busy.clear()
        world.barrier()
        began = time.perf_counter()
        engine.train(iter([batch]), lambda result: False)
        told = world.gather((began, time.perf_counter(), sum(busy)))
        whole = max(end for _, end, _ in told) - min(start for start, _, _ in told)
        shares.append(1 - sum(work for _, _, work in told) / (whole * world.size))
    engine.close()
    world.leave()
    return sorted(shares)[0]


def expected(plan: Plan) -> float:
    """Computes the idle share by the formula of the schedule's authors."""
    p, m, v = plan.pipeline, plan.microbatches, stages_each(plan)
    steps = {"gpipe": m, "1f1b": m, "interleaved": v * m, "zero_bubble": 3 * m}[plan.schedule]
    return (p - 1) / (steps + p - 1)


def main() -> None:
    local.start_server()
    rows = []
    for text in sys.argv[1:] or PLANS:
        plan = Plan.parse(text)
        found = local.local("benchmarks.bubble:measured", (text, SECONDS), plan.processes)
        wanted = expected(plan)
        rows.append((text, f"{wanted:.1%}", f"{found:.1%}", f"{100 * (found - wanted):+.1f}"))
        print("\t".join(rows[-1]), flush=True)
    print(table(("plan", "expected", "measured", "points"), rows))


if __name__ == "__main__":
    main()
