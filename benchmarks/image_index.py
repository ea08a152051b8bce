"""Measures an index of as many images as ImageNet has: `python -m benchmarks.image_index`.

A tar of 1,000 tars with 1.28 million members of a block each is written (1.3 GB), indexed once, and
opened in new processes: seconds to the first batch, memory that each worker adds, reads in order and at random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.figures import machine, spread, table
from grappe import Task
from grappe.data import Images
from grappe.data.images.index import open_index

CLASSES = 1000
READS = 10_000
BATCH = 256
BLOCK = 512


class Loading(Task):
    """A batch size: nothing is trained."""

    batch_size: int = BATCH


def whole(data: bytes, key: int, *, fast: bool = True) -> torch.Tensor:
    """A view that decodes nothing: what is measured is the way to the bytes."""
    return torch.zeros(8, dtype=torch.uint8)


def write(file: Path, images: int) -> None:
    """Writes the archive: each member one block of its name, in a tar for each class."""
    draw = random.Random(0)
    with file.open("wb") as stream:
        for label in range(CLASSES):
            names = [b"n%08d_%07d.JPEG" % (label, number) for number in range(images // CLASSES)]
            draw.shuffle(names)
            inner = b"".join(header(name) + name.ljust(BLOCK, b"\0") for name in names) + bytes(2 * BLOCK)
            outer = tarfile.TarInfo(f"n{label:08d}.tar")
            outer.size = len(inner)
            stream.write(outer.tobuf(tarfile.GNU_FORMAT) + inner)
        stream.write(bytes(2 * BLOCK))


_NAMELESS = tarfile.TarInfo()
_NAMELESS.size = BLOCK
PLAIN = _NAMELESS.tobuf(tarfile.USTAR_FORMAT)
CHECKSUM = sum(PLAIN) - sum(PLAIN[148:156]) + 8 * 32


def header(name: bytes) -> bytes:
    """A member's header; tarfile takes ten times as long to make one."""
    return b"%s%s%06o\0 %s" % (name, PLAIN[len(name) : 148], CHECKSUM + sum(name), PLAIN[156:])


def opened(source: Path, workers: int) -> dict[str, float]:
    """In a process of its own: seconds to the first batch, and the private memory of each worker in MB."""
    from grappe import Plan
    from grappe.data.loader import training_loader
    from grappe.launch.rank import ProcessRank
    from grappe.launch.world import World

    process = ProcessRank(rank=0, size=1, local_rank=0, local_size=1)
    world = World(process=process, device=torch.device("cpu"), data_rank=0, data_size=1)
    began = time.perf_counter()
    data: torch.utils.data.Dataset = Images(source, whole) if source.name != "none" else Nothing()
    loader = training_loader(Loading(), data, Plan.parse(f"workers={workers}"), world)
    batches = loader.batches(0, sys.maxsize)
    next(batches)
    first = time.perf_counter() - began
    for _ in range(60):
        next(batches)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"first": first, "private": sum(map(private, children)) / max(1, len(children))}


class Nothing(torch.utils.data.Dataset):
    """As many samples without an index, to compare workers' memory with."""

    def __len__(self) -> int:
        return 1_280_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(8, dtype=torch.uint8), 0


def private(process: str) -> float:
    """MB that a process shares with no other."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1e3


def reads(source: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Microseconds a read, of consecutive images and of random ones, in turns."""
    data = Images(source, whole)
    draw = random.Random(1)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        first = draw.randrange(len(data) - READS)
        for place, ids in enumerate((range(first, first + READS), draw.sample(range(len(data)), READS))):
            began = time.process_time()
            for index in ids:
                data.read(index)
            found[place].append(1e6 * (time.process_time() - began) / READS)
    return found


def child(source: Path, workers: int) -> dict[str, float]:
    """`opened`, in a new process."""
    words = [sys.executable, "-m", "benchmarks.image_index", "--one", str(source), "--workers", str(workers)]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    """Writes, indexes, opens and reads; prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_index", description=__doc__)
    parser.add_argument("--images", type=int, default=1_280_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--one", type=Path, help="open this source in this process, and print what it took")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(opened(options.one, options.workers)))
        return
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as folder:
        source = Path(folder) / "train.tar"
        write(source, options.images)
        before, began, used = machine(), time.perf_counter(), time.process_time()
        index, file = open_index(source)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        assert len(index) == options.images
        turns = [(child(source, options.workers), child(Path("none"), options.workers)) for _ in range(options.rounds)]
        alone = [child(source, 0)["first"] for _ in range(options.rounds)]
        inorder, atrandom = reads(source, options.rounds)
        rows = [
            ["indexing, once", f"{seconds:.0f} s ({used:.0f} s of CPU time)"],
            ["the index", f"{file.stat().st_size / 1e6:.0f} MB"],
            ["to the first batch, no worker", spread(alone).text("{:.2f}") + " s, aim: 2"],
            [
                f"to the first batch, {options.workers} workers",
                spread([a["first"] for a, _ in turns]).text("{:.2f}") + " s",
            ],
            [
                "more memory in each worker",
                spread([a["private"] - b["private"] for a, b in turns]).text("{:+.1f}") + " MB, aim: 5",
            ],
            ["a read in order", spread(inorder).text("{:.1f}") + " µs of CPU time"],
            [
                "more at random",
                spread([a - b for a, b in zip(atrandom, inorder, strict=True)]).text("{:+.1f}") + " µs, aim: 15",
            ],
        ]
    print(f"\n## An index of {options.images:,} images\n\nFrom {before}\nto {machine()}.\n")
    print(table(("", ""), rows))


if __name__ == "__main__":
    main()
