"""Walks over all images or rows of a source: makes its index, checks each, times rows, shows progress."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from grappe.data.corpus.corpus import Corpus
from grappe.data.corpus.formats import FORMATS, RowOptions
from grappe.data.corpus.index import find
from grappe.data.corpus.index import open_index as open_corpus_index
from grappe.data.images.decode import NoPicture, decoded, header_of, is_turned, simplejpeg
from grappe.data.images.index import Reader, open_index, quarantined, write_quarantine
from grappe.data.images.listing import is_image
from grappe.data.shards.selection import LeftOut
from grappe.errors import DataError
from grappe.errors.foreign_text import printable
from grappe.launch.terminal import progress
from grappe.launch.world import cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Indexed:
    """Result of indexing."""

    kind: str
    images: int
    classes: int
    left_out: LeftOut
    """Files that are no images."""
    quarantined: int
    file: Path
    size: int
    """Size of the index in bytes."""
    seconds: float


def index(source: Path, *, labels: Path | None = None, numbering: Path | None = None, again: bool = False) -> Indexed:
    """Reads the headers of a source once; a second call finds the index that the first has written.

    Raises:
        DataError: the source is missing, damaged, or of another form.
    """
    began = time.monotonic()
    source = source.absolute()
    index, file = open_index(source, labels, numbering, again=again, report=Ticker())
    return Indexed(
        kind=index.kind,
        images=len(index),
        classes=len(index.classes),
        left_out=index.left_out,
        quarantined=len(quarantined(source, index)),
        file=file,
        size=file.stat().st_size,
        seconds=time.monotonic() - began,
    )


_MOST_BAD = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Result of a check."""

    images: int
    bad: tuple[tuple[str, str], ...]
    """Name and reason of each that cannot be decoded."""
    quarantine: Path | None
    """The list that was written; None: all can be decoded."""
    left_out: LeftOut
    """Files that are no images."""
    turned: int
    """Images whose EXIF orientation would turn them: datasets take the pixels as they are stored."""
    sees_all: bool
    """Whether the decoder sees damage that leaves a picture, as simplejpeg does."""


def check(source: Path, *, labels: Path | None = None, numbering: Path | None = None) -> Checked:
    """Decodes every image of a source completely, and writes the list of undecodable ones next to the source.

    Raises:
        DataError: the source is missing or damaged as a whole, a file changes meanwhile, or more than half of the
            images cannot be decoded: then something else is wrong.
    """
    source = source.absolute()
    index = open_index(source, labels, numbering, report=Ticker())[0]
    reader = Reader(source, index)

    def reason(place: int) -> str:
        data = reader.read(place)
        turned.extend([place] * is_turned(data))
        try:
            decoded(data, header_of(data))
        except NoPicture as error:
            return str(error)
        return ""

    bad: dict[int, str] = {}
    turned: list[int] = []
    meter = ProgressMeter("checking", len(index))
    for place, why in enumerate(in_threads(reason, range(len(index)))):
        if why:
            bad[place] = why
        meter.at(place + 1, f"{len(bad):,} bad" if bad else "")
    meter.end()
    if len(bad) > _MOST_BAD * len(index):
        place, why = next(iter(bad.items()))
        raise DataError(
            f"{source}: {len(bad):,} of {len(index):,} images cannot be decoded, {reader.name(place)} "
            f"for example ({why}): no list is written, since this is not a collection of pictures"
        )
    return Checked(
        images=len(index),
        bad=tuple((reader.name(place), why) for place, why in bad.items()),
        quarantine=write_quarantine(source, index, bad),
        left_out=index.left_out,
        turned=len(turned),
        sees_all=simplejpeg() is not None,
    )


_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 10.0
_BAR = 24  # characters


class Ticker:
    """Rate-limits the progress messages of a walk: on a terminal a line that is rewritten, in a log a new one."""

    def __init__(self, show: Callable[[str], None] = progress) -> None:
        self._show = show
        self._pause = _TERMINAL_SECONDS if sys.stderr.isatty() else _LOG_SECONDS
        self._shown = time.monotonic()

    def is_due(self, now: float) -> bool:
        """Returns whether words shown `now` would not follow others too soon; they then count as shown."""
        due = now - self._shown >= self._pause
        if due:
            self._shown = now
        return due

    def __call__(self, words: str) -> None:
        """Shows `words`, unless others were shown a moment ago."""
        if self.is_due(time.monotonic()):
            self._show(words)


class ProgressMeter:
    """A line on standard error about a walk of a length that is known: a bar, the rate, and the time that is left."""

    def __init__(self, verb: str, total: int, show: Callable[[str], None] = progress, unit: str = "images") -> None:
        self._verb, self._total, self._show, self._unit = verb, total, show, unit
        self._began, self._ticker = time.monotonic(), Ticker(show)

    def at(self, done: int, note: str = "") -> None:
        """Shows that `done` images are done."""
        now = time.monotonic()
        if not self._ticker.is_due(now):
            return
        rate = done / (now - self._began)
        left = (self._total - done) / rate if rate else 0.0
        bar = "#" * round(done / self._total * _BAR)
        spoken = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        if left >= 100 * 60:
            spoken = f"{left / 3600:.1f} h"
        self._show(
            f"{self._verb} [{bar:<{_BAR}}] {done:,} of {self._total:,} {self._unit}, "
            f"{rate:,.0f}/s, {spoken} left" + (f", {note}" if note else "")
        )

    def end(self) -> None:
        """Removes the line."""
        self._show("")


T = TypeVar("T")
R = TypeVar("R")
_AHEAD = 8  # of each thread: images differ in size


def in_threads(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields the results of `work` for each item, in order; a thread for each core works ahead of the reader.

    Decoders release the GIL while they work, so threads are as quick as processes.
    """
    threads = cores()
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def is_corpus(source: Path) -> bool:
    """Returns whether a source has rows, and not images. A metadata file of Hugging Face's imagefolder decides nothing.

    Raises:
        DataError: it has both.
    """
    endings, rows, pictures = tuple(ending for ending in FORMATS if ending != ".tar"), "", ""
    for path in source.rglob("*") if source.is_dir() else [source]:
        name = str(path.relative_to(source.parent))
        if is_image(os.fsencode(name)):
            pictures = pictures or name
        elif path.name.endswith(endings) and not path.name.startswith((".", "metadata.")):
            rows = rows or name
        if pictures and rows:
            raise DataError(
                f"{printable(source)} has pictures ({printable(pictures)}) and rows ({printable(rows)}): name a folder "
                "or a file that has one of them"
            )
    return bool(rows)


def index_corpus(
    source: Path, *, dtype: str | None, end: int | None, again: bool = False, check: bool = False
) -> dict[str, Any]:
    """Indexes a corpus; with `check` reads it completely, and lists what is damaged.

    Returns:
        Format, rows, files, blocks, damaged parts, files left out, whether single rows are read (`direct`), the bytes
        that a process keeps of blocks (`memory`), the index, its size in bytes, and seconds.

    Raises:
        DataError: it is missing, or damaged.
    """
    began = time.monotonic()
    shards = find(source, RowOptions(None, dtype, end))
    made = open_corpus_index(shards, skip_damaged=check, again=again or check, report=Ticker())
    rows = int(made.blocks["rows"].sum(dtype=np.int64))
    corpus = Corpus(source, dtype=dtype, end=end, skip_damaged=check) if rows else None
    return {
        "format": shards.form.__name__,
        "rows": rows,
        "files": len(shards.names),
        "blocks": len(made.blocks),
        "direct": shards.form.direct,
        "memory": 0 if corpus is None else corpus.memory(),
        "damaged": made.damaged,
        "left_out": shards.left_out,
        "file": made.file,
        "size": 0 if made.file is None else made.file.stat().st_size,
        "seconds": time.monotonic() - began,
    }
