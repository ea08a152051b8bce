"""Runs a script that imports torchvision beside a torch without CUDA: `python torchvision_on_cpu.py SCRIPT …`.

PyPI's torchvision is built for CUDA. Its operators do not load beside a torch for CPUs, and the import fails when
it describes two of them that are not there. Defined first, it succeeds; datasets and transforms use neither.
"""

from __future__ import annotations

import runpy
import sys

import torch

MISSING = ("nms", "qnms")


def main() -> None:
    """Makes torchvision importable, lets it read files of any checksum, and runs the script."""
    library = torch.library.Library("torchvision", "DEF")
    for name in MISSING:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision.datasets import CIFAR10

    # None: no checksum. The benchmark's files have the official format and random pixels.
    CIFAR10.train_list = [[name, None] for name, _ in CIFAR10.train_list]
    CIFAR10.test_list = [[name, None] for name, _ in CIFAR10.test_list]
    CIFAR10.meta = {**CIFAR10.meta, "md5": None}
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
