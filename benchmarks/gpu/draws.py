"""Random numbers and augmentations keyed by sample have the same bits on the CPU and on the GPU."""

from __future__ import annotations

import torch

import grappe
from benchmarks.gpu.part import Part
from grappe.data import augment
from grappe.data.draw import sample_keys

SAMPLES = 100_003
IMAGES = 256
FUNCTIONS = {
    "random_resized_crop": lambda images, keys: augment.random_resized_crop(images, keys, 48),
    "colour_jitter": lambda images, keys: augment.colour_jitter(images, keys, hue=0.2),
    "rand_augment": augment.rand_augment,
    "trivial_augment": augment.trivial_augment,
    "auto_augment": augment.auto_augment,
    "erase": lambda images, keys: augment.erase(images, keys, p=1.0, fill=(1, 2, 3)),
    "mixup": lambda images, keys: augment.mixup(images, keys % 10, keys, 10, alpha=0.2)[0],
    "cutmix": lambda images, keys: augment.cutmix(images, keys % 10, keys, 10, alpha=0.2)[0],
}


def main(part: Part) -> None:
    """Draws for many samples on both devices."""
    keys = torch.from_numpy(sample_keys(7, 3, torch.arange(SAMPLES).numpy()))
    for count in (1, 5, 64):
        here, there = grappe.draw(keys, count), grappe.draw(keys.to(part.device), count).cpu()
        differing = int((here != there).sum())
        part.check(
            f"draw, {count} numbers a sample", differing == 0, f"{differing:,} of {here.numel():,} differ"
        )
    images = torch.randint(0, 256, (IMAGES, 3, 64, 64), dtype=torch.uint8)
    for name, function in FUNCTIONS.items():
        here = function(images, keys[:IMAGES])
        there = function(images.to(part.device), keys[:IMAGES].to(part.device)).cpu()
        differing = int((here != there).sum())
        part.check(f"augment.{name}", differing == 0, f"{differing:,} of {here.numel():,} levels differ")
