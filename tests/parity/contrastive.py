"""A task whose loss compares all samples of a batch with each other, as CLIP's; and its plain loop."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from grappe.data.arrays import Arrays
from grappe.data.batch import Batch, Microbatch
from grappe.data.sampling import SampleOrder
from grappe.launch.rank import ProcessRank
from grappe.step.loss import Loss
from grappe.step.whole_batch_loss import WholeBatchLosses
from grappe.task import Task
from tests.parity import cell


class TwoTowers(nn.Module):
    """Two encoders into one space, and the logit scale: a scalar."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 8))
        self.text = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        image, text = inputs
        return {
            "image": functional.normalize(self.image(image), dim=1),
            "text": functional.normalize(self.text(text), dim=1),
            "scale": self.scale.exp(),
        }


class Pairs(Task):
    """Task of matching texts and images."""

    whole_batch_loss = True
    epochs: int = 2
    batch_size: int = 14
    samples: int = 52  # the last batch of an epoch has 10
    width: int = 16
    dropout: float = 0.0
    weighted: bool = False
    rule: str = "sgd"

    def model(self) -> nn.Module:
        return TwoTowers(self.width, self.dropout)

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(self.samples, 6, generator=generator)
        image = torch.cat([hidden, torch.randn(self.samples, 6, generator=generator)], 1)
        return Arrays((image, hidden.roll(1, 1)), torch.arange(self.samples))

    def loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        logits = output["scale"] * output["image"] @ output["text"].T
        own = torch.arange(len(logits), device=logits.device)
        there = functional.cross_entropy(logits, own, reduction="none")
        return (there + functional.cross_entropy(logits.T, own, reduction="none")) / 2

    def counts(self, target: torch.Tensor) -> torch.Tensor | None:
        return (target % 3 + 1).float() if self.weighted else None

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        if self.rule == "adam":
            return torch.optim.Adam(named_parameters, lr=0.01)
        return torch.optim.SGD(named_parameters, lr=0.3, momentum=0.9)

    def units(self, model: Any) -> list[nn.Module]:
        return [model.image, model.text]


class Means(Pairs):
    """Task whose loss is a mean, as in any tutorial, with a term of the whole batch."""

    def loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        away = functional.mse_loss(output["image"], output["text"])
        return output["scale"] * away + output["image"].mean(0).square().sum()


class Views(Pairs):
    """Task of matching two noisy views (SimCLR), with one encoder, whose layers a pipeline can cut."""

    def model(self) -> nn.Module:
        layers = [nn.Linear(6, self.width), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(self.width, 8)]
        return nn.Sequential(*layers)

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(self.samples, 1, 6, generator=generator)
        views = hidden + 0.3 * torch.randn(self.samples, 2, 6, generator=generator)
        return Arrays(views, torch.arange(self.samples))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = functional.normalize(output, dim=2).transpose(0, 1).reshape(-1, output.shape[2])
        logits = (rows @ rows.T / 0.5).fill_diagonal_(-torch.inf)
        other = torch.arange(len(rows), device=rows.device).roll(len(output))
        return functional.cross_entropy(logits, other, reduction="none").view(2, -1).mean(0)

    def units(self, model: Any) -> list[nn.Module]:
        return list(model)


def plain(task: Pairs, steps: int) -> dict[str, Any]:
    """Trains in a loop written by hand, on one process, whole batches: losses, weights, and the evaluation's loss."""
    torch.manual_seed(task.seed)
    model, dataset = task.model().train(), task.data("train", Path())
    optimizer = task.optimizer(list(model.named_parameters()))
    order = SampleOrder(seed=task.seed, length=task.samples, batch_size=task.batch_size)
    losses, norms = [], []
    for step in range(steps):
        ids = torch.from_numpy(order.ids(*divmod(step, order.steps_per_epoch)))
        optimizer.zero_grad()
        loss = _mean(task, model, dataset, ids)[0]
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        several = [_mean(task, model, dataset, ids) for ids in torch.arange(task.samples).split(task.batch_size)]
    loss = sum(float(loss) * count for loss, count in several) / sum(count for _, count in several)
    weights = dict(model.state_dict())
    return {"losses": losses, "norms": norms, "weights": weights, "validation": loss, "metrics": {}}


def _mean(task: Pairs, model: nn.Module, dataset: Any, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    inputs = dataset.inputs
    given = tuple(one[ids] for one in inputs) if isinstance(inputs, tuple) else inputs[ids]
    targets = dataset.targets[ids]
    values, counts = task.loss(model(given), targets), task.counts(targets)
    counts = torch.ones(len(ids)) if counts is None else counts
    return (values * counts).sum() / counts.sum(), float(counts.sum())


def both_passes(process: ProcessRank, rendezvous_folder: Path, task: Task, plan: str) -> dict[str, Any]:
    """Trains, and compares each microbatch's output in the first pass with that in the second."""
    ahead: dict[int, Any] = {}
    passes, equal = 0, True
    look_ahead, call = WholeBatchLosses.look_ahead, WholeBatchLosses.__call__

    def noted(self: WholeBatchLosses, batch: Batch, outputs: Sequence[Any], scale: float) -> None:
        ahead.update({id(one): output for one, output in zip(batch.microbatches, outputs, strict=True)})
        look_ahead(self, batch, outputs, scale)

    def compared(self: WholeBatchLosses, output: Any, micro: Microbatch, batch: Batch, scale: float = 1.0) -> Loss:
        nonlocal passes, equal
        if id(micro) in ahead:
            passes += 1
            equal = equal and torch.equal(ahead.pop(id(micro)), output.detach())
        return call(self, output, micro, batch, scale)

    with (
        mock.patch.object(WholeBatchLosses, "look_ahead", noted),
        mock.patch.object(WholeBatchLosses, "__call__", compared),
    ):
        cell.train(process, rendezvous_folder, task, plan, 4)
    return {"passes": passes, "equal": equal}
