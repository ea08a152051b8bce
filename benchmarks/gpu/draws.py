"""Random numbers and augmentations keyed by sample have the same bits on the CPU and on the GPU."""

from __future__ import annotations

import torch

from benchmarks.gpu.part import Part
from grappe.contrib.doctor import on_device


def main(part: Part) -> None:
    """Draws for many samples on both devices, as `grappe doctor --gpu` does."""
    for trial in on_device.draws(torch.device(part.device)):
        if part.on_gpu or not trial.right:
            part.trial(trial)
        else:
            part.not_tried(trial.what, f"the CPU agrees with itself: {trial.text}")
