"""A task whose training has all that can be killed: processes, data workers, evaluations, saves."""

from pathlib import Path

import torch
from torch.utils.data import Dataset
from torchmetrics.aggregation import MeanMetric

from tests.faults.resume_cell import Apart
from tests.parity.tasks import Tokens


class Predictions(MeanMetric):
    """Metric with a state of its own: the mean of what the model says."""

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        super().update(output)


class Life(Tokens):
    """Sixty steps: saving, evaluating and training take as long as starting does."""

    epochs: int = 20
    apart: bool = False
    """Whether samples come one by one, by data workers."""

    def data(self, split: str, folder: Path) -> Dataset:
        whole = super().data(split, folder)
        return Apart(whole) if self.apart else whole

    def metrics(self):
        return {"said": Predictions()}
