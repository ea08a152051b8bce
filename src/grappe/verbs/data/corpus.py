"""Indexes, checks, times and tokenizes corpora: what `grappe data` does with folders of rows."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from grappe.data.corpus.corpus import Corpus
from grappe.data.corpus.formats import FORMATS, RowOptions, library
from grappe.data.corpus.index import find, open_index
from grappe.data.draw import permute
from grappe.errors import DataError, UsageError, reading
from grappe.launch import files
from grappe.verbs.data.walk import ProgressMeter, Ticker

_MANIFEST = "tokens.json"
_BATCH_ROWS = 1024
_ROWS = 1 << 14


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenized:
    """Result of tokenizing, of this process and of others before."""

    folder: Path
    parts: int
    rows: int
    tokens: int
    """Written by this process."""
    were_there: int
    """Parts that are there already, or that another process writes."""


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


def tokenize(
    corpus: Corpus,
    to: Path,
    tokenizer: Callable[[Sequence[str]], Sequence[Sequence[int]]],
    *,
    column: str = "text",
    end: int | None = None,
    name: str = "",
    rows_per_part: int = _ROWS,
) -> Tokenized:
    """Writes the tokens of each row's text as Arrow files of a column `tokens`, which `Windows` and `Packed` map.

    A part is there as a whole or not at all: what is killed goes on, and several processes share the work.

    Args:
        tokenizer: texts to their tokens.
        end: a token that is put after each document.
        name: of the tokenizer: a folder begun with another one is refused.

    Raises:
        UsageError: the folder was begun with other settings.
        DataError: a row has no text there, or the disk is full.
    """
    arrow = library("pyarrow", "tokenize")
    description = {
        "rows": len(corpus), "files": corpus.index.facts, "column": column, "end": end, "tokenizer": name,
        "rows_per_part": rows_per_part,
    }  # fmt: skip
    to.mkdir(parents=True, exist_ok=True)
    manifest, content = to / _MANIFEST, msgspec.json.encode(description)
    if manifest.is_file() and manifest.read_bytes() != content:
        raise UsageError(f"{to} was begun with other files or settings: give another folder, or remove it")
    if not manifest.is_file() and any(each.name != _MANIFEST for each in to.iterdir() if each.name[0] != "."):
        raise UsageError(f"{to} has other files: give a new folder")
    files.replace(manifest, content)
    kind, starts = arrow.list_(arrow.uint32()), range(0, len(corpus), rows_per_part)
    meter, rows, tokens, there = ProgressMeter("tokenizing", len(corpus), unit="rows"), 0, 0, 0
    for number, start in enumerate(starts):
        part = to / f"tokens-{number:06d}.arrow"
        with _taken(to / f".{part.name}.lock") as ours:
            if not ours or part.is_file():
                there += 1
                continue
            stop = min(start + rows_per_part, len(corpus))
            sink = arrow.BufferOutputStream()
            with arrow.ipc.new_file(sink, arrow.schema([("tokens", kind)])) as writer:
                for first in range(start, stop, _BATCH_ROWS):
                    texts = [_text(corpus, place, column) for place in range(first, min(first + _BATCH_ROWS, stop))]
                    ids = [[*each, end] if end is not None else list(each) for each in tokenizer(texts)]
                    writer.write_batch(arrow.record_batch([arrow.array(ids, kind)], names=["tokens"]))
                    rows, tokens = rows + len(ids), tokens + sum(map(len, ids))
                    meter.at(first + len(ids))
            try:
                files.replace(part, sink.getvalue().to_pybytes(), durable=True)
            except OSError as error:
                raise DataError(
                    f"{part} cannot be written: {error.strerror or error}. The parts before it stay"
                ) from None
    meter.end()
    return Tokenized(folder=to, parts=len(starts), rows=rows, tokens=tokens, were_there=there)


def _text(corpus: Corpus, place: int, column: str) -> str:
    row: Any = corpus.row(place)
    text = row.get(column) if isinstance(row, dict) else None
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    if not isinstance(text, str):
        names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{corpus.name}: row {place:,} has no text in {column!r}, but {names}: give --column")
    return text


@contextlib.contextmanager
def _taken(lock: Path) -> Iterator[bool]:
    """Context with whether this process has a part to itself."""
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
