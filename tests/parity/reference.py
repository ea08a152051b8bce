"""The reference that every plan is compared with: a plain loop, written by hand, on one process.

It shares with grappe only the initial weights and the order of the samples.
"""

import copy
from pathlib import Path
from typing import Any

import torch

from grappe.data.draw import mix
from grappe.data.sampling import SampleOrder, cut
from grappe.optimizers.common import begin_training
from grappe.task import Task


def train(
    task: Task, steps: int, pieces: int = 1, ways: int = 1, skip: int | None = None, double: bool = False
) -> dict[str, Any]:
    """Losses by step and final weights.

    Args:
        pieces: into how many parts each batch goes through the model one after the other, as microbatches do;
            what batch normalisation sees.
        skip: a step after which nothing is updated, as fp16 does after an infinity.
        ways: how many models with buffers of their own take turns, as processes with local statistics do.
        double: whether everything is in float64, but the draws of the initial weights.
    """
    torch.manual_seed(task.seed)
    model = task.model().train()
    if double:
        model.double()
    models = [model, *(copy.deepcopy(model) for _ in range(ways - 1))]
    dataset = _dataset(task, double)
    order = SampleOrder(seed=task.seed, length=len(dataset), batch_size=task.batch_size)
    optimizer = task.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    begin_training(optimizer)
    schedule = task.schedule(optimizer, task.epochs * order.steps_per_epoch)
    losses, norms = [], []
    for step in range(steps):
        ids = torch.from_numpy(order.ids(*divmod(step, order.steps_per_epoch)).copy())
        inputs, targets = dataset.inputs[ids], dataset.targets[ids]
        counts = task.counts(targets)
        total = len(ids) if counts is None else counts.sum()
        calls = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            torch.manual_seed(mix(task.seed, step, 0))  # dropout's
            loss = torch.zeros((), dtype=torch.float64 if double else torch.float32)
            for way in range(ways):
                first, last = cut(len(ids), ways, way)
                _share_parameters(model, models[way])
                for piece in range(pieces):
                    a, b = cut(last - first, pieces, piece)
                    if a == b:
                        continue
                    rows = slice(first + a, first + b)
                    values = task.loss(models[way](inputs[rows]), targets[rows])
                    part = (values if counts is None else values * counts[rows]).sum() / total
                    part.backward()
                    loss += part.detach()
            bound = task.clip if task.clip is not None else float("inf")
            calls.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), bound).item()))
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            if step != skip:
                optimizer.step(*([closure] if hasattr(optimizer, "first_step") else []))
        if schedule is not None and step != skip:
            schedule.step()
        losses.append(calls[0][0])
        norms.append(calls[0][1])
    return {"losses": losses, "norms": norms, "weights": _weights(models), **_scores(task, models[0], double)}


def _dataset(task: Task, double: bool) -> Any:
    dataset = task.data("train", Path())
    if double and dataset.inputs.is_floating_point():
        dataset.inputs = dataset.inputs.double()
    return dataset


@torch.no_grad()
def _scores(task: Task, model: torch.nn.Module, double: bool) -> dict[str, Any]:
    """The whole dataset through the model at once; not for models whose buffers differ between ways."""
    dataset, model = _dataset(task, double), model.eval()
    output = model(dataset.inputs)
    values, counts = task.loss(output, dataset.targets), task.counts(dataset.targets)
    counts = torch.ones(len(values)) if counts is None else counts
    metrics = {}
    for name, metric in task.metrics().items():
        metric.update(task.scored(output), dataset.targets)
        metrics[name] = metric.compute().tolist()
    model.train()
    return {"validation": ((values * counts).sum() / counts.sum()).item(), "metrics": metrics}


def _share_parameters(model: torch.nn.Module, other: torch.nn.Module) -> None:
    if model is other:
        return
    modules = dict(other.named_modules())
    for name, module in model.named_modules():
        modules[name]._parameters = module._parameters


def _weights(models: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    weights = {name: parameter.detach() for name, parameter in models[0].named_parameters()}
    for name, buffer in models[0].named_buffers():
        alike = [dict(model.named_buffers())[name] for model in models]
        weights[name] = torch.stack(alike).mean(0) if buffer.is_floating_point() else buffer
    return weights
