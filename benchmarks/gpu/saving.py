"""Time for which a checkpoint holds a training up: of a real one, and of the largest state that fits."""

from __future__ import annotations

import itertools
import statistics
import time

import torch

from benchmarks.gpu.pace import give_memory_back, train_here
from benchmarks.gpu.part import Aim, Part
from benchmarks.gpu.tasks import Tokens
from grappe.checkpoint.saver import Snapshots
from grappe.checkpoint.tensor_file import Piece
from grappe.profiling import memory
from grappe.training.options import Options

SAVES, AFTER = 3, 3
"""Saves in a training's middle, and steps of each whose time counts."""
AIM = Aim(figure=50, form="{:.0f} ms", at_most=True)
WANTED = 40e9
"""Bytes of the state that the aim is for."""
DEVICE_SHARE, HOST_SHARE = 0.9, 0.45
"""Of free memory: a copy on the host must leave room for the rest of a training."""


def main(part: Part) -> None:
    """Measures a training's stall, then the copy to the host of the largest state."""
    _training(part)
    give_memory_back()
    _largest(part)


def _training(part: Part) -> None:
    """Saves GPT-2 124M's shape made wider (5 GB of weights and moments) on a GPU, a tiny one on a CPU."""
    if part.on_gpu:
        task = Tokens(width=1536, depth=12, heads=24, batch_size=16, samples=4096)
        every = 60  # a save is on the disk before the next one begins
    else:
        task = Tokens(width=64, depth=2, heads=2, vocabulary=512, context=64, batch_size=4, samples=256)
        every = 15
    with torch.device("meta"):
        state = 3 * 4 * sum(parameter.numel() for parameter in task.model().parameters())
    ends: list[float] = []
    options = Options(steps=SAVES * every + AFTER, save_every=every, evaluate_every=10**9, keep=1)
    train_here(part, task, "precision=bf16", "saving", options, lambda: ends.append(time.perf_counter()))
    # By the clock: a step's own seconds leave saving out. A save comes before its step's end.
    seconds = dict(enumerate((b - a for a, b in itertools.pairwise(ends)), 2))
    plain = statistics.median(seconds.values())
    stalls = [sum(seconds[every * save + after] - plain for after in range(AFTER)) for save in range(1, SAVES + 1)]
    found = max(stalls[1:])
    part.measured(
        "a training's stall by a save",
        f"{found * 1e3:.0f} ms at most behind the first save ({stalls[0] * 1e3:.0f} ms), for {state / 1e9:.3g} GB of "
        f"state; a step takes {plain * 1e3:.0f} ms",
        stall_seconds=found,
        state_bytes=state,
    )


def _largest(part: Part) -> None:
    """Copies 40 GB, or what fits, as a save does before the training goes on; buffers are there from the second on."""
    size = _fitting() if part.on_gpu else 64e6
    each = 256 << 20 if part.on_gpu else 4 << 20
    pieces = []
    for number in range(int(size) // each):
        data = torch.full((each // 4,), float(number), device=part.device)
        pieces.append(Piece(str(number), data, tuple(data.shape), (0,)))
    part.wait()
    snapshots, taken = Snapshots(), list[float]()
    for _ in range(3):
        began = time.perf_counter()
        copies, copied = snapshots.take(pieces)
        taken.append(time.perf_counter() - began)
    last = float(copies[-1].data[-1])
    part.check("the copy of a large state is whole", copied and last == len(pieces) - 1)
    total, found = each * len(pieces), statistics.median(taken[1:])
    part.measured(
        "stall of a save of the largest state",
        f"{found * 1e3:.0f} ms for {total / 1e9:.3g} GB, {total / found / 1e9:.1f} GB/s to the host; the first one, "
        f"which makes the host's buffers, {taken[0]:.1f} s",
        aim=AIM,
        found=found * 1e3,
        stall_seconds=found,
        state_bytes=total,
    )


def _fitting() -> float:
    """Returns the bytes of the largest state, up to what is wanted, that the device and the host's memory hold."""
    free, _ = torch.cuda.mem_get_info()
    return min(WANTED, DEVICE_SHARE * free, HOST_SHARE * (memory.free() or WANTED))
