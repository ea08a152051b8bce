"""Indexes, checks and times corpora, and loads tokenizers: what `grappe data` does with folders of rows."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from grappe.data.corpus.corpus import Corpus
from grappe.data.corpus.formats import FORMATS, RowOptions
from grappe.data.corpus.index import find, open_index
from grappe.data.draw import permute
from grappe.errors import DataError, reading
from grappe.verbs.data.walk import Ticker


def is_corpus(source: Path) -> bool:
    """Returns whether a source has rows, and not images: files of a corpus that are no tar shards."""
    endings = tuple(ending for ending in FORMATS if ending != ".tar")
    inside = source.rglob("*") if source.is_dir() else [source]
    return any(each.name.endswith(endings) for each in inside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexedCorpus:
    """Result of indexing or checking a corpus."""

    format: str
    rows: int
    files: int
    blocks: int
    direct: bool
    """Whether single rows are read; else blocks."""
    memory: int
    """Bytes that a process keeps of blocks, at most."""
    damaged: tuple[str, ...]
    file: Path
    size: int
    """Of the index in bytes."""
    seconds: float


def index(
    source: Path, *, dtype: str | None, end: int | None, again: bool = False, check: bool = False
) -> IndexedCorpus:
    """Indexes a corpus; with `check` reads it completely, and lists what is damaged.

    Raises:
        DataError: it is missing, or damaged.
    """
    began = time.monotonic()
    shards = find(source, RowOptions(None, dtype, end))
    made, file = open_index(shards, skip_damaged=check, again=again or check, report=Ticker())
    rows = int(made.blocks["rows"].sum(dtype=np.int64))
    corpus = Corpus(source, dtype=dtype, end=end, skip_damaged=check) if rows else None
    return IndexedCorpus(
        format=shards.form.__name__,
        rows=rows,
        files=len(shards.names),
        blocks=len(made.blocks),
        direct=made.direct,
        memory=0 if corpus is None else corpus.memory(),
        damaged=made.damaged,
        file=file,
        size=file.stat().st_size,
        seconds=time.monotonic() - began,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchedCorpus:
    """Result of timing a corpus, in rows a second of one process."""

    in_files: float
    """In the order of the files."""
    in_epoch: float
    """In the order of an epoch."""


def bench(source: Path, *, dtype: str | None, end: int | None, seconds: float) -> BenchedCorpus:
    """Times the reading of rows by one process.

    Raises:
        DataError: the corpus is missing, or damaged.
    """
    corpus = Corpus(source, dtype=dtype, end=end)
    count, order = len(corpus), corpus.epoch_order()
    positions = np.arange(count, dtype=np.int64)
    shuffled = permute(positions, key=1, length=count) if order is None else order.order(0, 0, 0, count, 1)
    rates = []
    corpus.row(0)  # the format's library is imported
    for ids in (positions, shuffled):
        began, done = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            for place in ids[done % count : done % count + 64].tolist():
                corpus.row(place)
                done += 1
        rates.append(done / passed)
    return BenchedCorpus(in_files=rates[0], in_epoch=rates[1])


def tokenizer_of(file: Path) -> tuple[Callable[[Sequence[str]], list[list[int]]], str]:
    """Loads the tokenizer of a tokenizer.json, or of a folder that has one: texts to tokens, and a hash of the file.

    Raises:
        DataError: it is none, or the library is not installed.
    """
    path = file / "tokenizer.json" if file.is_dir() else file
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError("a tokenizer.json needs tokenizers: pip install tokenizers") from None
    with reading(path):
        content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises no narrower one
        raise DataError(f"{path} is no tokenizer.json: {error}") from None
    return lambda texts: [each.ids for each in tokenizer.encode_batch(list(texts))], hashlib.sha256(content).hexdigest()
