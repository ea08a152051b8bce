"""The native engine's steps make the host wait for no GPU: on tests.gpu_stand_in, since this machine has none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from grappe import Arrays, Task, normalise, rand_like, randn_like
from grappe.checkpoint.initial import built
from grappe.data import augment
from grappe.data.loader import training_loader
from grappe.engines.base import EngineSetup
from grappe.engines.native import Native
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.optimizers import LAMB, LARC, LARS, Muon
from grappe.plan import Plan
from grappe.step.loss import HostCopy
from grappe.step.noise_scale import NoiseScale
from grappe.step.observers import Observers
from grappe.step.scores import TrainingScores
from grappe.training.loop import WeightAverage
from tests.gpu_stand_in import GPU, GpuStandIn, Wait

WARM, STEPS = 2, 3
OPTIMIZERS = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.1),
    "lamb": LAMB,
    "lars": LARS,
    "larc": LARC,
    "muon": Muon,
}


class Images(Task):
    """Images in memory, changed by most of grappe.data.augment and normalised by Arrays' own transform."""

    batch_size: int = 8
    clip: float | None = 1.0
    kind: str = "sgd"

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(4 * 36, 10)
        )

    def data(self, split: str, folder: Path) -> Arrays:
        images = np.zeros((64, 3, 8, 8), np.uint8)
        return Arrays(images, np.zeros(64, np.int64), transform=normalise((0.5,) * 3, (0.5,) * 3))

    def augment(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        inputs = augment.erase(augment.pad_and_crop(augment.flip(inputs, keys), keys), keys)
        return augment.mixup_or_cutmix(inputs, targets, keys, 10)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.kind](named_parameters)

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)


class Bytes(Images):
    """Images that stay bytes, for the augmentations that take no others."""

    def data(self, split: str, folder: Path) -> Arrays:
        return Arrays(np.zeros((64, 3, 8, 8), np.uint8), np.zeros(64, np.int64))

    def model(self) -> nn.Module:
        return nn.Sequential(_Float(), super().model())

    def augment(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        inputs = augment.random_resized_crop(augment.colour_jitter(inputs, keys, hue=0.1), keys, 8)
        inputs = augment.trivial_augment(augment.rand_augment(inputs, keys), keys)
        return augment.auto_augment(inputs, keys), targets


class _Float(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.float()


class Samples(Dataset):
    """Samples that are loaded one by one, and are no tensors alone."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[dict[str, Any], Tensor]:
        return {"image": torch.zeros(3, 8, 8), "name": str(index)}, torch.tensor(index % 10)


class Named(Images):
    """Samples from a dataset; two losses with counts of their own; random numbers in the forward."""

    def data(self, split: str, folder: Path) -> Samples:
        return Samples()

    def forward(self, model: nn.Module, inputs: Any) -> Tensor:
        image = inputs["image"]
        return model(image + rand_like(image) + randn_like(image))

    def augment(self, inputs: Any, targets: Tensor, keys: Tensor) -> tuple[Any, Tensor]:
        return {**inputs, "image": augment.flip(inputs["image"], keys)}, targets

    def loss(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"classes": F.cross_entropy(output, target, reduction="none"), "size": output.square()}

    def counts(self, target: Tensor) -> Mapping[str, Tensor]:
        return {"classes": (target != 3).float(), "size": torch.ones(len(target), 10, device=target.device)}


class Compared(Images):
    """A loss that compares the samples of the batch."""

    whole_batch_loss = True

    def augment(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, targets

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output @ output.T).square().mean(1)


def waits(gpu: GpuStandIn, task: Task, text: str, noise: NoiseScale | None = None) -> list[Wait]:
    """Returns the calls that wait, of STEPS steps once WARM steps have made what is kept."""
    plan = Plan.parse(text)
    world = World(process=ProcessRank(), device=GPU)
    loader = training_loader(task, task.data("train", Path()), plan, world)
    average, scores = WeightAverage(0.9), TrainingScores(task, world, metrics=False)
    observers = Observers(optimizer=[average.watch], output=[scores.add])
    if noise is not None:
        observers = Observers(phase=[noise.on_phase], optimizer=[noise.on_optimizer], output=[noise.on_output])
    of_task = {"task": task, "plan": plan, "weights": built(task), "total_steps": 100, "samples": 64}
    engine = Native(EngineSetup(world=world, observers=observers, **of_task))
    before: list[Any] = []
    for number, batch in enumerate(loader.batches(0, WARM + STEPS)):
        result = engine.step(batch)
        average.update()
        for copy in before:  # one step late, as training.Training does
            copy.read()
        norm = [] if result.norm is None else [HostCopy(result.norm)]
        before = [result.sums, *norm]
        scores.copied()
        if number == WARM - 1:
            gpu.waits.clear()
            gpu.event_waits = 0
    found, gpu.waits = gpu.waits, []
    return found


@pytest.mark.parametrize(
    ("task", "text"),
    [
        *((Images(kind=kind), "") for kind in OPTIMIZERS),
        (Images(), "microbatches=3,channels_last"),
        (Images(), "exact=2"),
        (Images(clip=None), ""),
        (Bytes(), ""),
        (Named(), "workers=0"),
        (Named(), "workers=0,microbatches=2"),
        (Compared(), "microbatches=2"),
    ],
    ids=lambda one: one if isinstance(one, str) else f"{type(one).__name__}-{one.kind}",
)
def test_a_step_waits_for_nothing(gpu: GpuStandIn, task: Task, text: str) -> None:
    assert waits(gpu, task, text) == []
    numbers = 1 if task.clip is None else 2  # a step's loss and norm, when the next step has been enqueued
    assert gpu.event_waits == numbers * STEPS


def test_samples_that_do_not_fit_the_gpu_are_copied_without_waiting(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 1000))
    assert waits(gpu, Images(), "") == []
    assert "copy to the GPU on side" in gpu.calls


def test_the_noise_of_gradients_is_added_up_without_waiting(gpu: GpuStandIn) -> None:
    noise = NoiseScale(data_size=1, batch_size=8, short_step=None, steps_per_epoch=8, start=0)
    found = waits(gpu, Images(), "microbatches=2", noise)
    assert found == []


def test_fp16_reads_each_steps_norm(gpu: GpuStandIn) -> None:
    """Counts fp16's one wait: torch.amp.GradScaler has it too, since an overflow skips optimizer and schedule."""
    found = waits(gpu, Images(), "precision=fp16")
    assert [one.line.partition(":")[0] for one in found] == ["step/clip.py"] * STEPS


def test_the_stand_in_notes_what_waits(gpu: GpuStandIn) -> None:
    x = torch.ones(4, device="cuda")
    host = torch.ones(4).pin_memory()
    for number, call in enumerate(
        (
            lambda: x.sum().item(),
            lambda: bool(x.isfinite().all()),
            x.cpu,
            x.tolist,
            lambda: torch.ones(4).to("cuda"),
            lambda: torch.ones(4).to("cuda", non_blocking=True),  # not page-locked
            lambda: host.to("cuda"),
            lambda: torch.tensor([1.0], device="cuda"),
            lambda: x[[0, 1]],
            lambda: x[torch.tensor([0, 1])],
            lambda: x.copy_(torch.ones(4)),
            lambda: torch.equal(x, x),
        )
    ):
        gpu.waits.clear()
        call()
        assert len(gpu.waits) == 1, number
    gpu.waits.clear()
    for quiet in (
        lambda: host.to("cuda", non_blocking=True),
        lambda: torch.where(x > 0, x, 0.0),
        lambda: x.to("cpu", non_blocking=True),
        lambda: x[torch.arange(2, device="cuda")],
        lambda: HostCopy(x),
    ):
        quiet()
    assert gpu.waits == []
