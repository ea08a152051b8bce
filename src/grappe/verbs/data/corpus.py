"""Indexes, checks and times corpora, and loads tokenizers: what `grappe data` does with folders of rows."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grappe.data.corpus.corpus import Corpus
from grappe.data.corpus.formats import FORMATS, RowOptions
from grappe.data.corpus.index import find, open_index
from grappe.data.sampling import SampleOrder
from grappe.errors import DataError, reading
from grappe.verbs.data.walk import Ticker


def is_corpus(source: Path) -> bool:
    """Returns whether a source has rows, and not images: files of a corpus that are no tar shards."""
    endings = tuple(ending for ending in FORMATS if ending != ".tar")
    inside = source.rglob("*") if source.is_dir() else [source]
    return any(each.name.endswith(endings) for each in inside)


def index(
    source: Path, *, dtype: str | None, end: int | None, again: bool = False, check: bool = False
) -> dict[str, Any]:
    """Indexes a corpus; with `check` reads it completely, and lists what is damaged.

    Returns:
        Format, rows, files, blocks, damaged parts, whether single rows are read (`direct`), the bytes that a process
        keeps of blocks (`memory`), the index, its size in bytes, and seconds.

    Raises:
        DataError: it is missing, or damaged.
    """
    began = time.monotonic()
    shards = find(source, RowOptions(None, dtype, end))
    made, file = open_index(shards, skip_damaged=check, again=again or check, report=Ticker())
    rows = int(made.blocks["rows"].sum(dtype=np.int64))
    corpus = Corpus(source, dtype=dtype, end=end, skip_damaged=check) if rows else None
    return {
        "format": shards.form.__name__,
        "rows": rows,
        "files": len(shards.names),
        "blocks": len(made.blocks),
        "direct": made.direct,
        "memory": 0 if corpus is None else corpus.memory(),
        "damaged": made.damaged,
        "file": file,
        "size": file.stat().st_size,
        "seconds": time.monotonic() - began,
    }


def bench(source: Path, *, dtype: str | None, end: int | None, seconds: float) -> dict[str, float]:
    """Times the reading of rows by one process, in rows a second: in the files' order, and in an epoch's.

    Raises:
        DataError: the corpus is missing, or damaged.
    """
    corpus = Corpus(source, dtype=dtype, end=end)
    count, order = len(corpus), corpus.epoch_order()
    orders = {"in_files": SampleOrder(seed=0, length=count, batch_size=64, shuffle=False)}
    orders["in_epoch"] = SampleOrder(seed=0, length=count, batch_size=64, sampling=order)
    rates = {}
    corpus.row(0)  # the format's library is imported
    for name, of_rows in orders.items():
        began, step = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            for place in of_rows.ids(0, step % of_rows.steps_per_epoch).tolist():
                corpus.row(place)
            step += 1
        rates[name] = min(step * 64, step * count) / passed
    return rates


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
