"""GPT-2's shape in bf16: tokens/s of grappe and of a loop written by hand, as shares of the device's peak."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks.gpu.part import Part
from benchmarks.gpu.tasks import Tokens
from benchmarks.gpu.training import train

WARMUP, STEPS = 10, 30
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "V100": 125e12}
"""Dense bf16 (V100: fp16) operations a second of the data sheets, by a part of the device's name."""


def main(part: Part) -> None:
    """Measures GPT-2 124M on a GPU, a tiny one on a CPU."""
    task = (
        Tokens()
        if part.on_gpu
        else Tokens(width=64, depth=2, heads=2, vocabulary=512, context=64, batch_size=4, samples=256)
    )
    tokens, flops = task.batch_size * task.context, task.flops_per_token()
    peak = _matmul_peak(part)
    for compiled in (False, True) if part.on_gpu else (False,):
        by_hand = tokens / _by_hand(part, task, compiled)
        rate = tokens / _grappe(part, task, compiled)
        shares = [f"{rate / by_hand:.3f} of by hand", f"{rate * flops / peak:.1%} of the measured peak"]
        if sheet := _data_sheet(part):
            shares.append(f"{rate * flops / sheet:.1%} of the data sheet's")
        part.measured(
            f"GPT-2 shape, bf16, {'compiled' if compiled else 'eager'}",
            ", ".join([f"{rate:,.0f} tokens/s", *shares]),
            tokens_per_second=rate,
            ratio_to_by_hand=rate / by_hand,
        )


def _data_sheet(part: Part) -> float | None:
    name = torch.cuda.get_device_name() if part.on_gpu else ""
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def _grappe(part: Part, task: Tokens, compiled: bool) -> float:
    """Returns seconds a step: the median of steps after the warm-up."""
    plan = "precision=bf16" + (",compile" if compiled else "")
    run = train(part, task, plan, f"speed-{compiled}", steps=WARMUP + STEPS, bare=True)
    return statistics.median(record["seconds"] for record in list(run.records("step"))[WARMUP:])


def _by_hand(part: Part, task: Tokens, compiled: bool) -> float:
    """Returns seconds a step of the same model in a plain loop."""
    device = torch.device(part.device)
    torch.manual_seed(0)
    model = task.model().to(device)
    optimizer = task.optimizer(model.named_parameters())
    forward = torch.compile(model) if compiled else model
    data = task.data("train", part.scratch)
    seconds = []
    with _quiet():
        for step in range(WARMUP + STEPS):
            began = time.perf_counter()
            first = step * task.batch_size % (task.samples - task.batch_size)
            inputs, targets = (
                torch.as_tensor(one[first : first + task.batch_size]).to(device, non_blocking=True)
                for one in (data.inputs, data.targets)
            )
            with torch.autocast(part.device, torch.bfloat16):
                loss = task.loss(forward(inputs), targets).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip or 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if part.on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARMUP:])


def _matmul_peak(part: Part) -> float:
    """Returns operations a second of a large bf16 matrix product on this device."""
    size, repeats = (8192, 20) if part.on_gpu else (512, 3)
    a = torch.randn(size, size, device=part.device, dtype=torch.bfloat16)
    rates = []
    for _ in range(3):
        a @ a
        _wait(part)
        began = time.perf_counter()
        for _ in range(repeats):
            a @ a
        _wait(part)
        rates.append(2 * size**3 * repeats / (time.perf_counter() - began))
    part.measured("bf16 matrix product", f"{max(rates) / 1e12:.3g} Tflop/s", flops=max(rates))
    return max(rates)


def _wait(part: Part) -> None:
    if part.on_gpu:
        torch.cuda.synchronize()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds the threads at one, as the plan of the other contender does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
