"""Tests grappe's promises on a real device: the bits of draws and exact trainings; reads memory and power."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe.data.arrays import Arrays
from grappe.errors import UsageError
from grappe.plan import Plan
from grappe.task import Task

DRAWN = 100_003
"""Samples that numbers are drawn for; no multiple of anything."""
IMAGES = 256
STEPS = 8
EXACT = ("exact=2", "exact=2,replicate=2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTrial:
    """A promise that was tried, or a measurement.

    Attributes:
        right: whether the promise was kept; None: nothing is promised, or it could not be tried.
        text: the figures, or the reason why it could not be tried, in a line.
        figures: the same as numbers: bytes, watts, FLOP/s; empty where it could not be tried.
    """

    what: str
    right: bool | None
    text: str
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Returns passed, FAILED, measured or not tried."""
        if self.right is not None:
            return "passed" if self.right else "FAILED"
        return "measured" if self.figures else "not tried"


def try_gpu() -> Iterator[DeviceTrial]:
    """Tests all promises on torch's GPU 0, in about a minute.

    Raises:
        UsageError: there is no GPU that torch can use.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "--gpu: torch sees no GPU here, so there is nothing to check; grappe doctor without --gpu shows why, and "
            "`nvidia-smi` whether the machine has one"
        )
    # The pair first: this process has no memory of the GPU yet, and MPS starts before its clients.
    yield exact_pair("cuda")
    device = torch.device("cuda", 0)
    yield from draws(device)
    yield from readings(device)


def draws(device: torch.device) -> Iterator[DeviceTrial]:
    """Compares random numbers and augmentations keyed by sample on `device` with the CPU's, bit by bit."""
    from grappe.data import augment
    from grappe.data.draw import draw, sample_keys

    keys = torch.from_numpy(sample_keys(7, 3, torch.arange(DRAWN).numpy()))
    for count in (1, 5, 64):
        yield _same(f"draw, {count} numbers a sample", draw(keys, count), draw(keys.to(device), count))
    images = torch.randint(0, 256, (IMAGES, 3, 64, 64), dtype=torch.uint8)
    keys = keys[:IMAGES]
    augmentations: dict[str, Callable[[Any, Any], Any]] = {
        "random_resized_crop": lambda images, keys: augment.random_resized_crop(images, keys, 48),
        "colour_jitter": lambda images, keys: augment.colour_jitter(images, keys, hue=0.2),
        "rand_augment": augment.rand_augment,
        "trivial_augment": augment.trivial_augment,
        "auto_augment": augment.auto_augment,
        "erase": lambda images, keys: augment.erase(images, keys, p=1.0, fill=(1, 2, 3)),
        "mixup": lambda images, keys: augment.mixup(images, keys % 10, keys, 10, alpha=0.2)[0],
        "cutmix": lambda images, keys: augment.cutmix(images, keys % 10, keys, 10, alpha=0.2)[0],
        "cutmix, probabilities": lambda images, keys: augment.cutmix(images, keys % 10, keys, 10, alpha=0.2)[1],
        "mixup, probabilities": lambda images, keys: augment.mixup(images, keys % 10, keys, 10, alpha=0.2)[1],
    }
    for name, function in augmentations.items():
        yield _same(f"augment.{name}", function(images, keys), function(images.to(device), keys.to(device)))


def exact_pair(device: str) -> DeviceTrial:
    """Trains a small network under `exact` on one process and on two that share the device, and compares the bits."""
    hashes = {}
    with tempfile.TemporaryDirectory(prefix="grappe-doctor-") as folder:
        for plan in EXACT:
            shared = ",per_device=2" if device == "cuda" and "replicate" in plan else ""
            hashes[plan] = _trained(f"{plan},device={device},threads=1{shared}", Path(folder) / plan)
    return DeviceTrial(
        what="exact on one process and on two: the same bits",
        right=len(set(hashes.values())) == 1,
        text=", ".join(f"{plan}: {value[:12]}" for plan, value in hashes.items()),
    )


def readings(device: torch.device) -> Iterator[DeviceTrial]:
    """Reads the device's memory and power, which measurements and reports need; a reading must be possible."""
    from grappe.profiling import energy

    if device.type != "cuda":
        yield DeviceTrial(what="memory and power of the GPU", right=None, text="this is a CPU")
        return
    free, total = torch.cuda.mem_get_info(device)
    yield DeviceTrial(
        what="memory",
        right=0 < free <= total,
        text=f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free",
        figures={"free_bytes": free, "total_bytes": total},
    )
    reading = energy.gpu_counters(device.index or 0)
    if not reading.counters:
        yield DeviceTrial(what="power", right=None, text=reading.missing)
        return
    gpu: Any = reading.counters[0]
    try:
        watts, limit = gpu.watts(), gpu.limit_watts()
    except OSError as error:
        yield DeviceTrial(what="power", right=None, text=str(error))
        return
    yield DeviceTrial(
        what="power",
        right=0 < watts <= 1.1 * limit,
        text=f"{watts:.0f} W now, of at most {limit:.0f}",
        figures={"watts": watts, "limit_watts": limit},
    )


def _same(what: str, here: Tensor, there: Tensor) -> DeviceTrial:
    differing = int((here != there.cpu()).sum())
    return DeviceTrial(what=what, right=not differing, text=f"{differing:,} of {here.numel():,} numbers differ")


def _trained(plan: str, folder: Path) -> str:
    """Trains the small network for a few steps; returns the hash of its weights' bits."""
    from grappe.training.options import Options
    from grappe.training.request import Request
    from grappe.training.task_reference import TaskReference
    from grappe.verbs.load import load
    from grappe.verbs.train import run_training

    task, options = TaskReference.of(BitExactTask()), Options(steps=STEPS)
    request = Request(task=task, plan=Plan.parse(plan), run=folder, data=folder.parent, options=options, quiet=True)
    model = load(run_training(request).run)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class BitExactTask(Task):
    """The task whose bits are compared: convolutions, normalisation, dropout and a short last batch."""

    epochs: int = 1
    batch_size: int = 64
    clip: float | None = 1.0
    samples: int = 300

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(16 * 49, 32),
            nn.GELU(),
            nn.Linear(32, 10),
        )

    def data(self, split: str, folder: Path) -> Arrays:
        source = torch.Generator().manual_seed(5 if split == "train" else 6)
        images = torch.randn(self.samples, 3, 16, 16, generator=source)
        return Arrays(images, torch.randint(10, (self.samples,), generator=source))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named_parameters, lr=0.05, momentum=0.9)
