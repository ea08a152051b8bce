"""Describes the machine that a table is of, in a line."""

from __future__ import annotations

import os
import time

from benchmarks import figures


def describe(device: str) -> str:
    """Names the device, and the versions of torch and CUDA; of a CPU, says that nothing here is of a GPU."""
    import torch

    if device == "cpu":
        return f"a CPU (nothing here says anything of a GPU), {figures.machine()}"
    about = torch.cuda.get_device_properties(0)
    return (
        f"{about.name}, {about.total_memory / 1e9:.0f} GB, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"{len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d %H:%M')}"
    )
