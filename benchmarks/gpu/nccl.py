"""NCCL in one process: a group made by grappe's own functions, collectives, DDP, and a plan that needs the group."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.part import Part
from benchmarks.gpu.tasks import Small
from benchmarks.gpu.training import distance, train, weights
from grappe.launch import rendezvous
from grappe.launch.rank import ProcessRank
from grappe.launch.world import choose_backend, choose_device, gather_into
from grappe.plan import Plan
from grappe.step.precision import set_gpu_arithmetic

STEPS = 8
ALLOWED = 1e-5
REPEATS = 20


def main(part: Part) -> None:
    """Tries the backend that a plan on this device takes: NCCL on a GPU, gloo on a CPU."""
    _offload(part)  # in a process of its own, before this one takes the device
    plan = Plan.parse(f"device={part.device}")
    process = ProcessRank(rank=0, size=1, local_rank=0, local_size=1)
    device = choose_device(plan, process)
    backend = choose_backend(plan, device)
    rendezvous.start(process, backend, device, part.scratch, timedelta(seconds=60))
    # The same bits each time, as far as the libraries have them, in all digits.
    set_gpu_arithmetic("fp32")
    torch.backends.cudnn.deterministic = True
    try:
        _collectives(part, backend, device)
        _replicated(part, backend, device)
    finally:
        dist.destroy_process_group()
    if backend != "nccl":
        part.not_tried("NCCL in one process", "NCCL needs a GPU; gloo took its place above")


def _offload(part: Part) -> None:
    """Offload shards over a group of one process."""
    plain = weights(train(part, Small(), "", "plain", steps=STEPS).folder)
    found = weights(train(part, Small(), "offload=cpu", "offloaded", steps=STEPS).folder)
    gap = distance(plain, found)
    part.check(
        "offload=cpu on one process",
        gap <= ALLOWED,
        f"{gap:.1e} from the plain process, {ALLOWED:.0e} allowed",
        distance=gap,
    )


def _collectives(part: Part, backend: str, device: torch.device) -> None:
    count = 1 << (28 if part.on_gpu else 18)
    numbers = torch.arange(count, dtype=torch.float32, device=device)
    expected, whole = numbers.clone(), torch.empty_like(numbers)
    dist.all_reduce(numbers)
    gather_into(whole, numbers, dist.group.WORLD)
    dist.broadcast(whole, src=0)
    right = torch.equal(numbers, expected) and torch.equal(whole, expected)
    part.check(f"{backend}: all-reduce, all-gather and broadcast in one process", right)
    part.wait()
    began = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(numbers)
    part.wait()
    seconds = (time.perf_counter() - began) / REPEATS
    text = f"{seconds * 1e3:.3f} ms for {count * 4 / 1e9:.2g} GB"
    part.measured(f"{backend}: an all-reduce in one process", text, seconds=seconds)


def _replicated(part: Part, backend: str, device: torch.device) -> None:
    """Trains with DDP of one process and without it: a sum over one process is what it was."""
    plain, replicated = (_trained(device, ddp=ddp) for ddp in (False, True))
    gap = distance(plain, replicated)
    part.check(
        f"{backend}: DDP of one process learns what the plain loop learns",
        gap <= ALLOWED,
        f"{gap:.1e} apart, {ALLOWED:.0e} allowed",
        distance=gap,
    )


def _trained(device: torch.device, *, ddp: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Small().model().to(device)
    random = torch.Generator().manual_seed(5)
    images = torch.randn(STEPS, 64, 3, 16, 16, generator=random).to(device)
    labels = torch.randint(10, (STEPS, 64), generator=random).to(device)
    wrapped: nn.Module = DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch, label in zip(images, labels, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(batch), label).backward()
        optimizer.step()
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
