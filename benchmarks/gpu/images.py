"""ResNet-50 in bf16 and channels_last: images/s from JPEG files by grappe's own loader, and from memory."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch

import grappe
from benchmarks.gpu import photos
from benchmarks.gpu.pace import seconds_a_step
from benchmarks.gpu.part import Aim, Part
from grappe import Arrays
from grappe.tasks.imagenet import ImageNet
from grappe.verbs.data.pack import Packing, pack

MEMORY_PLANS = ("precision=bf16,channels_last", "precision=bf16,channels_last,compile")
"""The first alone is tried on a CPU, and is what files are fed to."""
LOADING = ("loading=threads", "loading=processes")
AIM = Aim(figure=3700, form="{:,.0f} images/s")


class InMemory(ImageNet):
    """The same network on random images as bytes, which a GPU holds itself."""

    images: int = 4096

    def data(self, split: str, folder: Path) -> Arrays:  # type: ignore[override]
        source = torch.Generator().manual_seed(0)
        shape = (self.images, 3, self.image_size, self.image_size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)
        return Arrays(images, torch.randint(self.classes, (self.images,), generator=source))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the measurement; `images` is a multiple of `batch`, so that all steps are alike."""

    images: int
    batch: int
    side: int
    classes: int
    warmup: int
    steps: int
    workers: int


def main(part: Part) -> None:
    """Measures ResNet-50 at 224 pixels on a GPU, ResNet-18 at 32 pixels on a CPU."""
    if part.on_gpu:
        cores = len(os.sched_getaffinity(0))
        size = Size(images=4096, batch=256, side=224, classes=1000, warmup=24, steps=48, workers=cores - 1)
    else:
        size = Size(images=32, batch=8, side=32, classes=4, warmup=2, steps=6, workers=1)
    kilobytes = photos.make(part.scratch / "train", size.images, size.classes)
    pack(part.scratch / "train", part.scratch / "packed", Packing(short=256 if part.on_gpu else 48))
    first, *others = MEMORY_PLANS
    memory = _measure(part, size, "in memory", InMemory, first, images=size.images)
    for loading in LOADING if part.on_gpu else LOADING[:1]:
        plan = f"{first},workers={size.workers},{loading}"
        for source, name in (("train", f"JPEG files of {kilobytes:.0f} kB"), ("packed", "packed JPEG files")):
            _measure(part, size, name, ImageNet, plan, memory, train_images=source)
    for plan in others:
        if part.on_gpu:
            _measure(part, size, "in memory", InMemory, plan, memory, images=size.images)
        else:
            part.not_tried(f"ResNet-50, in memory, {plan}", "on a GPU only")


def _measure(
    part: Part, size: Size, source: str, kind: type[ImageNet], plan: str, memory: float | None = None, **fields: object
) -> float:
    """Reports images/s of a source, and returns them.

    Args:
        memory: images/s of images in memory, under the first plan.
    """
    network = "resnet50" if part.on_gpu else "resnet18"
    task: grappe.Task = kind(
        network=network,  # type: ignore[arg-type]
        classes=size.classes,
        image_size=size.side,
        batch_size=size.batch,
        validation_images="train",
        **fields,  # type: ignore[arg-type]
    )
    name = f"{source}, {plan}"
    rate = size.batch / seconds_a_step(part, task, plan, name.replace(" ", "-"), size.warmup, size.steps)
    beside = "" if memory is None else f", {rate / memory:.3f} of images in memory"
    part.measured(
        f"{'ResNet-50' if part.on_gpu else 'ResNet-18'}, {name}",
        f"{rate:,.0f} images/s{beside}",
        aim=AIM,
        found=rate,
        images_per_second=rate,
    )
    return rate
