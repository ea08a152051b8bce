"""Machine speed: FLOP/s of a matrix product, bytes/s of memory, of this machine's cores."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from grappe.launch.rank import ProcessRank

SIDE = 1024
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPIED = 128 << 20  # bytes: more than caches hold
REPEATS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedRequest:
    """Numbers of threads to measure with."""

    threads: Sequence[int]
    run: None = None


def worker(
    request: SpeedRequest, process: ProcessRank, rendezvous_folder: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns FLOP/s by precision and threads, and bytes/s by threads."""
    flops, bandwidth = {}, {}
    for threads in request.threads:
        torch.set_num_threads(threads)
        for name, kind in PRECISIONS.items():
            a, b = (torch.ones(SIDE, SIDE, dtype=kind) for _ in range(2))
            flops[f"{name}/{threads}"] = 2 * SIDE**3 / _best(lambda a=a, b=b: a @ b)
        source, target = torch.ones(COPIED // 4), torch.ones(COPIED // 4)
        bandwidth[str(threads)] = 2 * COPIED / _best(lambda s=source, t=target: t.copy_(s))
    return flops, bandwidth


def _best(work: object) -> float:
    assert callable(work)
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
