"""Photographs made of random numbers: JPEG files of ImageNet's usual size, where no pictures can be fetched."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 500, 375
"""ImageNet's most frequent size, in pixels; with this grain a file has about its mean size, 110 kB."""
GRAIN = 14.0
QUALITY = 92
CONTENTS = 512
"""Different files; the others have their content, which takes as long to decode."""


def make(folder: Path, count: int, classes: int) -> float:
    """Writes `count` files into folders of classes; returns their mean size in kB."""
    random = np.random.default_rng(0)
    grain = random.normal(0, GRAIN, (HEIGHT, WIDTH, 3))
    for label in range(classes):
        (folder / f"class{label:04d}").mkdir(parents=True)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        contents = list(threads.map(lambda number: _jpeg(number, grain), range(min(count, CONTENTS))))
    total = 0
    for number in range(count):
        place = folder / f"class{number % classes:04d}" / f"{number:06d}.jpg"
        total += place.write_bytes(contents[number % len(contents)])
    return total / count / 1e3


def _jpeg(number: int, grain: np.ndarray) -> bytes:
    """A picture of smooth colours, edges and grain."""
    random = np.random.default_rng(number)
    few = Image.fromarray(random.integers(0, 256, (9, 12, 3), np.uint8))
    smooth = np.asarray(few.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
    left, top = random.integers(0, WIDTH - 100), random.integers(0, HEIGHT - 100)
    smooth = smooth.copy()
    smooth[top : top + 100, left : left + 100] *= 0.4
    pixels = smooth + np.roll(grain, int(random.integers(0, WIDTH)), axis=1)
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=QUALITY)
    return stream.getvalue()
