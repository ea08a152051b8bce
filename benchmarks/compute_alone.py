"""Upper limit by compute alone: the small CIFAR-10 network, trained on one batch that never changes or moves.

Each process takes its share of the batch and steps by itself: nothing is read, gathered, normalised or
communicated. `python -m benchmarks.compute_alone --threads 2` prints images/s.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from typing import Any

import torch
import torch.nn.functional as F

from grappe.tasks.cifar10 import Small

WARMUP = 5  # steps


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compute_alone", description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--batch", type=int, default=512, help="over all processes")
    parser.add_argument("--steps", type=int, default=98)
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()
    rate = images_per_second(options.processes, options.threads, options.batch, options.steps, options.channels_last)
    print(f"images/s {rate:.1f}")


def images_per_second(processes: int, threads: int, batch: int, steps: int, channels_last: bool) -> float:
    """Images/s of all processes together, from when all have started to when the last has ended."""
    rows = batch // processes
    if processes == 1:
        began, ended = _steps(rows, threads, steps, channels_last)
        return steps * batch / (ended - began)
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(processes)
    with context.Pool(processes, initializer=_remember, initargs=(together,)) as pool:
        request = [(rows, threads, steps, channels_last)] * processes
        times = pool.starmap(_steps_together, request, chunksize=1)
    return steps * rows * processes / (max(ended for _, ended in times) - min(began for began, _ in times))


def _steps(rows: int, threads: int, steps: int, channels_last: bool, together: Any = None) -> tuple[float, float]:
    """Returns the begin of the first step and the end of the last, on the system's monotonic clock."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    form = torch.channels_last if channels_last else torch.contiguous_format
    net = Small().to(memory_format=form)
    images = torch.randn(rows, 3, 32, 32).contiguous(memory_format=form)
    labels = torch.randint(10, (rows,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    began = 0.0
    for step in range(-WARMUP, steps):
        if step == 0:
            if together is not None:
                together.wait()
            began = time.monotonic()
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
    return began, time.monotonic()


_together: Any = None


def _remember(together: Any) -> None:
    global _together  # noqa: PLW0603  a pool hands barriers over in no other way
    _together = together


def _steps_together(rows: int, threads: int, steps: int, channels_last: bool) -> tuple[float, float]:
    return _steps(rows, threads, steps, channels_last, _together)


if __name__ == "__main__":
    main()
