"""pysource with a model of some size and next to no data: `grappe train` takes it as a user's own task file."""

from pathlib import Path

import torch

from grappe import Arrays
from grappe.tasks.pysource import PySource


class Short(PySource):
    """38 million parameters, of 152 MB; 610 MB with their gradients and Adam's state."""

    batch_size: int = 4
    width: int | None = 512
    depth: int | None = 12
    heads: int | None = 8
    context: int = 32
    megabytes: float = 0.3

    def data(self, split: str, folder: Path) -> Arrays:
        whole = super().data(split, folder)
        return Arrays(whole.inputs[:8], whole.targets[:8], transform=torch.Tensor.long)
