"""The largest batch that fits, under a limit that is reached soon, and in a dataset that ends before."""

import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from grappe import Arrays, Task
from grappe.errors import GrappeError
from grappe.plan import Plan
from grappe.verbs.measure import measure

pytestmark = pytest.mark.slow

PLAN = Plan(device="cpu", threads=1)
WIDTH = 1 << 18  # a megabyte a sample


class Wide(nn.Module):
    """Keeps a megabyte of each sample for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.expand(-1, WIDTH) * self.weight[0]
        return (wide * wide).mean(1, keepdim=True) * self.weight


class Hungry(Task):
    """Needs about two megabytes a sample, and more in backward."""

    epochs: int = 1
    batch_size: int = 16
    broken: bool = False
    samples: int = 4096

    def model(self) -> nn.Module:
        return Wide()

    def data(self, split: str, folder: Path) -> Arrays:
        return Arrays(torch.ones(self.samples, 1), torch.zeros(self.samples, dtype=torch.long))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.broken:
            raise ValueError("broken")
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)


def test_memory_ends_it() -> None:
    limit = 1 << 30
    [found] = measure.largest_batches(Hungry(), [PLAN], limit=limit)
    assert found.too_large is not None
    assert found.batch < found.too_large <= 1024
    assert found.too_large - found.batch <= max(2, found.too_large // 8)
    assert found.batch > 64
    assert str(found) == f"largest batch of device=cpu,threads=1: {found.batch} ({found.too_large} does not fit)"
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY  # the limit was its processes'


def test_the_dataset_ends_it() -> None:
    [found] = measure.largest_batches(Hungry(samples=24), [PLAN])
    assert (found.batch, found.too_large) == (24, None)
    assert "all of the dataset" in str(found)


def test_another_failure_is_told() -> None:
    with pytest.raises(GrappeError, match="broken"):
        list(measure.largest_batches(Hungry(broken=True), [PLAN]))


def test_the_share_of_what_is_free(tmp_path: Path) -> None:
    fake = tmp_path / "meminfo"
    fake.write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert measure._share(Plan(device="cpu", replicate=2), fake) == 32 * 1024
    assert measure._share(Plan(device="cpu"), tmp_path / "none") is None
    assert measure._share(Plan(device="cuda"), fake) is None
