"""Passport: measured speeds of a machine or an allocation, kept as JSON and compared with another machine's."""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch

from grappe.contrib.lab.explain import reachable_by_precision
from grappe.errors import RunError, UsageError
from grappe.errors.foreign_text import printable
from grappe.foresight.devices import device_reported
from grappe.launch import files
from grappe.launch.rank import ProcessRank, rank_from_environment
from grappe.launch.start import start
from grappe.launch.world import choose_device, join
from grappe.plan import Plan
from grappe.words import host_name, processor_name

REPEATS = 5
COPIED = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes; no cache holds them
ON_DISK, REDUCED = 1 << 28, 1 << 26  # bytes
PATIENCE = timedelta(minutes=10)  # for first processes of nodes, which measure before they join the others
NEAR = 1.1  # times as fast: less is no difference
Speed = Annotated[float, msgspec.Meta(gt=0, lt=1e12)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passport:
    """Measured speeds of a machine, or of the slowest node of an allocation."""

    kind: Literal["passport"] = "passport"
    host: str
    date: str
    device: str
    """Name of the GPU, or of the processor."""
    figures: Mapping[str, Annotated[tuple[Speed, ...], msgspec.Meta(min_length=1, max_length=1000)]]
    """Speed of each repetition, by name and unit: `memory, GB/s`."""


def measure(folder: Path) -> Passport:
    """Measures the disk of `folder` and this machine, or all nodes of this allocation, in about a minute. Collective.

    Without a launcher there is a process on each GPU, or two on a CPU.
    """
    process = rank_from_environment()
    plan = Plan(replicate=process.size if process else torch.cuda.device_count() or 2)
    folder.mkdir(parents=True, exist_ok=True)
    return start("grappe.contrib.doctor.passport:worker", folder, plan, run=folder)


def worker(folder: Path, process: ProcessRank, rendezvous_folder: Path) -> Passport:
    """Runs one process: a node's first measures the node, before all measure an all-reduce. Collective."""
    plan = Plan(replicate=process.size)
    device = choose_device(plan, process)
    own = {} if process.local_rank else dict(_node(device, folder))
    world = join(plan, process, rendezvous_folder, PATIENCE)
    if world.size > 1:
        numbers, ring = torch.ones(REDUCED // 4, device=device), 2 * (world.size - 1) / world.size
        speeds = _speeds(ring * REDUCED, lambda: torch.distributed.all_reduce(numbers), device)
        own[f"all-reduce of {world.size} processes, GB/s"] = speeds
    nodes = [speeds for speeds in world.gather(own) if speeds]
    world.leave()
    return Passport(
        host=host_name(),
        date=f"{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        figures={key: min((node[key] for node in nodes if key in node), key=statistics.median) for key in nodes[0]},
    )


def _node(device: torch.device, folder: Path) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Measures one node, on the device of its first process."""
    products = [reachable_by_precision(device, Plan()) for _ in range(REPEATS)]
    for name in products[0]:
        yield f"matrix product in {name}, TFLOP/s", tuple(each[name] / 1e12 for each in products)
    size = COPIED[device.type]
    here, there = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    yield "memory, GB/s", _speeds(2 * size, lambda: there.copy_(here), device)  # bytes are read, and written
    if device.type == "cuda":
        host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        yield "host to GPU, GB/s", _speeds(size, lambda: here.copy_(host), device)
        yield "GPU to host, GB/s", _speeds(size, lambda: host.copy_(here), device)
    content = os.urandom(ON_DISK)  # a disk that compresses gains nothing

    def write() -> None:
        file.seek(0)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())

    def read_back() -> None:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else memory would be read
        file.seek(0)
        while file.read(1 << 24):
            pass

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            yield "disk write, GB/s", _speeds(ON_DISK, write, device)
            if hasattr(os, "posix_fadvise"):
                yield "disk read, GB/s", _speeds(ON_DISK, read_back, device)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}: give --runs a folder with room for 256 MB") from error


def _speeds(size: float, work: Callable[[], object], device: torch.device) -> tuple[float, ...]:
    """Measures GB/s of `work`, which moves `size` bytes: REPEATS times, after one that warms up."""
    speeds = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        speeds.append(size / 1e9 / (time.perf_counter() - began))
    return tuple(speeds[1:])


def read(file: Path) -> Passport:
    """Reads a passport.

    Raises:
        UsageError: the file is none.
    """
    try:
        return msgspec.json.decode(files.read_text(file, 0), type=Passport)
    except (OSError, RunError, msgspec.MsgspecError) as error:
        raise UsageError(f"{file} is no file of grappe doctor --passport: {printable(error, 300)}") from None


def lines(passport: Passport) -> Iterator[str]:
    """Yields each figure in words: the median, the range, and the share of the data sheet's value, if grappe has it."""
    peaks: dict[str, float] = {}
    if sheet := device_reported(passport.device):
        peaks = {f"matrix product in {name}, TFLOP/s": peak for name, peak in sheet.tflops.items()}
        peaks["memory, GB/s"] = sheet.bandwidth_gb
    for key, speeds in passport.figures.items():
        name, _, unit = key.rpartition(", ")
        middle, peak = statistics.median(speeds), peaks.get(key)
        share = f", {middle / peak:.0%} of the data sheet's {peak:.4g}" if peak else ""
        yield f"{name}: {middle:.4g} {unit} ({min(speeds):.4g} to {max(speeds):.4g}){share}"


def compare(here: Passport, there: Passport) -> list[str]:
    """Compares two passports, the largest difference first; where repetitions overlap there is no verdict."""
    compared = []
    host = printable(there.host, 60)
    for key, old in there.figures.items():
        name, _, unit = printable(key, 80).rpartition(", ")
        if (new := here.figures.get(key)) is None:
            compared.append((0.0, f"{name}: not measured here"))
            continue
        now, then = statistics.median(new), statistics.median(old)
        times, both = max(now / then, then / now), f"{now:.4g} {unit}, there {then:.4g}"
        if times <= NEAR:
            text = f"{name}: as fast, within 10 %: {both}"
        elif min(old) <= max(new) and min(new) <= max(old):
            text = (
                f"{name}: no verdict, a machine is busy: {min(new):.4g} to {max(new):.4g} {unit}, there {min(old):.4g} "
                f"to {max(old):.4g}"
            )
            times = 0.5
        else:
            text = f"{name} {times:.1f} times {'slower' if now < then else 'faster'} than on {host}: {both}"
        compared.append((times, text))
    return [text for _, text in sorted(compared, key=lambda each: -each[0])]
