"""Measures how many images a second this machine loads, by where they lie and by what loads them; says what to do."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from grappe.data.arrays import Arrays
from grappe.data.draw import mix, permute
from grappe.data.images.dataset import Images
from grappe.data.images.decode import CentreCrop, RandomResizedCrop
from grappe.data.loading import Loading
from grappe.data.seeded import SeededDataset
from grappe.data.source import Samples, source_of
from grappe.errors import DataError
from grappe.launch.terminal import progress
from grappe.launch.world import cores
from grappe.task import Task
from grappe.verbs.data.pack import Packing, pack, shard_name, write_shard
from grappe.words import format_bytes

_BATCH = 32
_WARM = 2  # batches that are not timed
_COLD = 128  # images that are read from the disk
_WORTH = 1.2  # of a rate: less is no reason to change anything
_TURNS = 3
_MEMORY = "decoded, in memory"
SHORT = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One place of images, in images a second; None: it cannot be measured so."""

    place: str
    bytes: int
    """Mean bytes of an image."""
    cold: float | None = None
    """Read by one reader, from the disk."""
    read: float | None = None
    """The same from memory."""
    alone: float | None = None
    """Samples, made by the training's process itself."""
    threads: float | None = None
    """The same by threads, one a core."""
    processes: float | None = None
    """The same by worker processes, one a core."""

    @property
    def best(self) -> float:
        """The highest rate of samples."""
        return max(self.alone or 0.0, self.threads or 0.0, self.processes or 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benched:
    """Result of `grappe data bench`."""

    rows: tuple[Row, ...]
    """The first is the source as it is."""
    images: int
    """In the measurement."""
    cores: int
    advice: tuple[str, ...]


def bench(
    source: Path,
    *,
    size: int = 224,
    images: int = 512,
    seconds: float = 1.0,
    on: Path | None = None,
    labels: Path | None = None,
    numbering: Path | None = None,
) -> Benched:
    """Measures a source as it is, and some of its images as an archive, as shards, packed, and decoded in memory.

    Args:
        size: of a sample's side, in pixels.
        seconds: for each measurement.
        on: the folder for copies of the images, on the disk to measure; they are removed again. None: the
            system's temporary folder.

    Raises:
        DataError: the source is damaged, or the copies do not fit.
    """
    view = RandomResizedCrop(size=size)
    data = Images(source, view, labels=labels, numbering=numbering)
    chosen = np.sort(permute(np.arange(len(data)), key=mix(0, len(data)), length=len(data))[:images])
    try:
        with tempfile.TemporaryDirectory(prefix=".grappe-bench-", dir=on) as folder:
            rows = _rows(data, chosen.tolist(), view, Path(folder), seconds)
    except OSError as error:
        raise DataError(
            f"copies for the measurement cannot be written: {error.strerror or error}: give a folder with room by --on"
        ) from None
    progress("")
    measured = tuple(rows)
    return Benched(rows=measured, images=len(chosen), cores=cores(), advice=tuple(advice(measured, data, size)))


def _rows(data: Images, chosen: Sequence[int], view: RandomResizedCrop, folder: Path, seconds: float) -> list[Row]:
    """Measures all places by turns, and takes the best of each: other programs make no place quicker."""
    places = [("as it is", data, chosen), *_copies(data, chosen, view, folder)]
    progress("decoding into memory")
    middle = Images(places[-1][1].source, CentreCrop(size=view.size))
    arrays = Arrays(torch.stack([middle[index][0] for index in range(len(chosen))]), torch.zeros(len(chosen)))
    ways = {
        "alone": Loading(),
        "threads": Loading(kind="threads", workers=cores()),
        "processes": Loading(kind="processes", workers=cores()),
    }
    best: dict[tuple[str, str], float] = collections.defaultdict(float)  # images a second
    for turn in range(_TURNS):
        for name, images, ids in places:
            progress(f"turn {turn + 1} of {_TURNS}: {name}")
            rates = dict(zip(("cold", "read"), _read(images, ids), strict=True))
            rates |= {way: _loaded(images, ids, ways[way], seconds / _TURNS) for way in ways}
            for way, rate in rates.items():
                best[name, way] = max(best[name, way], rate)
        order = np.random.default_rng(0)
        batches = (arrays.gather(order.integers(0, len(arrays), _BATCH)) for _ in itertools.count())
        best[_MEMORY, "alone"] = max(best[_MEMORY, "alone"], _rate(batches, seconds / _TURNS))
    rows = [
        Row(
            place=name,
            bytes=sum(len(images.read(index)) for index in ids) // len(ids),
            **{way: best[name, way] for way in ("cold", "read", *ways)},
        )
        for name, images, ids in places
    ]
    return [*rows, Row(place=_MEMORY, bytes=arrays.inputs[0].numel(), alone=best[_MEMORY, "alone"])]


def _copies(
    data: Images, chosen: Sequence[int], view: RandomResizedCrop, folder: Path
) -> Iterator[tuple[str, Images, range]]:
    labels, everything = data.targets(), range(len(chosen))
    files = {index: data.read(index) for index in chosen}
    archive, shards = folder / "archive", folder / "shards"
    for place in (archive, shards):
        place.mkdir()
    members = [(f"{labels[index]:05d}/{index:08d}.jpg", content) for index, content in files.items()]
    write_shard(archive, 0, sorted(members), len(members))
    yield "one archive", Images(archive / shard_name(0), view), everything
    share = -(-len(chosen) // 4)
    for number, first in enumerate(range(0, len(chosen), share)):
        part = chosen[first : first + share]
        pairs = [((f"{i:08d}.cls", b"%d" % labels[i]), (f"{i:08d}.jpg", files[i])) for i in part]
        write_shard(shards, number, itertools.chain.from_iterable(pairs), len(part))
    (shards / "classes.txt").write_text("".join(f"{name}\n" for name in data.classes))
    yield "shards", Images(shards, view), everything
    packed = pack(archive / shard_name(0), folder / "packed", Packing(short=SHORT)).folder
    yield f"packed, short side {SHORT}", Images(packed, view), everything


def _read(images: Images, ids: Sequence[int]) -> tuple[float, float]:
    """Files a second of one reader, from the disk and from memory."""
    some = [ids[place] for place in np.random.default_rng(0).permutation(len(ids))[:_COLD]]
    for index in ids:
        images.forget(index)
    took = []
    for _ in range(2):
        began = time.perf_counter()
        for index in some:
            images.read(index)
        took.append(time.perf_counter() - began)
    return len(some) / took[0], len(some) / took[1]


def _loaded(data: Images, chosen: Sequence[int], loading: Loading, seconds: float) -> float:
    """Samples a second under a way to load, in batches as in a training."""
    samples = Samples(dataset=SeededDataset(data, seed=0), task=Task(), pin=False, prefetch=2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a training's own threads compute
    source = source_of(samples, loading)
    order = np.random.default_rng(0)
    try:
        source.begin(
            [(0, chosen[place]) for place in order.integers(0, len(chosen), _BATCH)] for _ in itertools.count()
        )
        return _rate((source.next() for _ in itertools.count()), seconds)
    finally:
        source.close()
        torch.set_num_threads(before)


def _rate(batches: Iterator[object], seconds: float) -> float:
    for _ in range(_WARM):
        next(batches)
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds or count < _WARM:
        next(batches)
        count += 1
    return count * _BATCH / passed


def advice(rows: Sequence[Row], data: Images, size: int) -> Iterator[str]:
    """Says what to do, from the rates."""
    here, packed, memory = rows[0], rows[-2], rows[-1]
    ways = {"workers=0": here.alone, "loading=threads": here.threads, "loading=processes": here.processes}
    best = max(ways, key=lambda name: ways[name] or 0.0)
    yield f"as it is: {best} is the quickest, {here.best:,.0f} images/s on {cores()} cores with no training running"
    if here.cold is not None and here.cold * cores() < here.best:
        yield (
            f"the disk is slower than the decoder ({here.cold:,.0f} images/s by one reader): grappe data stage, "
            "or more workers than cores"
        )
    if packed.best > _WORTH * here.best and packed.bytes < here.bytes / _WORTH:
        yield (
            f"packed, samples are made {packed.best / here.best:.1f} times as fast, of {packed.bytes / here.bytes:.0%} "
            f"of the bytes: grappe data pack --short {SHORT}"
        )
    everything = memory.bytes * len(data)
    if memory.best > _WORTH * packed.best:
        yield (
            f"decoded at {size} x {size}, all {len(data):,} images take {format_bytes(everything)} of memory: grappe."
            "Arrays of them, if a node has that, and crops by the task's augment"
        )
