"""Random numbers keyed by sample have the same bits on the CPU and on the GPU."""

from __future__ import annotations

import torch

import grappe
from benchmarks.gpu.part import Part
from grappe.data.draw import sample_keys

SAMPLES = 100_003


def main(part: Part) -> None:
    """Draws for many samples on both devices."""
    keys = torch.from_numpy(sample_keys(7, 3, torch.arange(SAMPLES).numpy()))
    for count in (1, 5, 64):
        here, there = grappe.draw(keys, count), grappe.draw(keys.to(part.device), count).cpu()
        differing = int((here != there).sum())
        part.check(
            f"draw, {count} numbers a sample", differing == 0, f"{differing:,} of {here.numel():,} differ"
        )
