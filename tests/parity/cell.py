"""One cell of the parity grid: a task under a plan, on the processes of a pool."""

from pathlib import Path
from typing import Any

import torch

from grappe import engines
from grappe.checkpoint.initial import built
from grappe.data.loader import BatchLoader, evaluation_loader, training_loader
from grappe.engines.base import Engine, EngineSetup
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World, join
from grappe.plan import Plan
from grappe.task import Task

TOLERANCE = 1e-5  # contract 7: per tensor, in norm, after at most 10 steps in fp32


def engine_of(
    task: Task, plan: Plan, world: World, dataset: Any, total_steps: int | None = None
) -> tuple[Engine, BatchLoader]:
    """Makes the plan's engine, for `total_steps` or else the task's epochs, and the loader of its batches."""
    loader = training_loader(task, dataset, plan, world)
    setup = EngineSetup(
        task=task,
        plan=plan,
        world=world,
        weights=built(task),
        total_steps=total_steps or task.epochs * loader.order.steps_per_epoch,
        sample_inputs=loader.example(),
        samples=len(dataset),
    )
    return engines.check(plan)(setup), loader


def train(
    process: ProcessRank, rendezvous_folder: Path, task: Task, text: str, steps: int, folder: Path = Path()
) -> dict[str, Any]:
    """Losses, norms and, on process 0, the final weights; the evaluation's scores too."""
    plan = Plan.parse(text + (",threads=1" if text else "threads=1"))
    world = join(plan, process, rendezvous_folder)
    dataset = task.data("train", folder)
    engine, loader = engine_of(task, plan, world, dataset)
    results = []
    engine.train(loader.batches(0, steps), lambda result: bool(results.append(result)))
    losses = [result.sums.read()[0] / float(result.batch.count) for result in results]
    norms = [float(result.norm) if result.norm is not None else None for result in results]
    held_out = evaluation_loader(task, dataset, plan, world)
    scores = engine.evaluate(held_out.batches(0, held_out.order.steps_per_epoch), held_out.order.length)
    weights = {name: tensor.clone() for name, tensor in engine.train_state.export()}
    ids = [result.batch.ids.tolist() for result in results]
    told = {"skipped": [result.skipped for result in results], "lr": [result.lr for result in results]}
    told["remarks"] = list(engine.remarks())
    engine.close()
    world.leave()
    told["sent"] = {} if world.domain is None else dict(world.domain.of_step)
    return {"losses": losses, "norms": norms, "weights": weights, "scores": scores, "ids": ids, **told}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest |a - b| / |a| over the tensors, and which; the tensors must have the same names."""
    assert set(a) == set(b), set(a) ^ set(b)
    worst = (0.0, "")
    for name, tensor in a.items():
        size = tensor.double().norm().item()
        gap = (tensor.double() - b[name].double()).norm().item() / (size or 1.0)
        worst = max(worst, (gap, name))
    return worst
