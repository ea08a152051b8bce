"""Writes the tokens of a corpus of text once, as Arrow files that trainings map."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from grappe.data.corpus.corpus import Corpus
from grappe.data.corpus.formats import library
from grappe.errors import DataError, UsageError, reading
from grappe.launch import files

_MANIFEST = "tokens.json"
_BATCH_ROWS = 1024


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


def tokenize(
    corpus: Corpus,
    to: Path,
    tokenizer: Callable[[Sequence[str]], Sequence[Sequence[int]]],
    *,
    column: str = "text",
    end: int | None = None,
    name: str = "",
    rows_per_part: int = 1 << 14,
    report: Callable[[int], None] = lambda rows: None,
) -> Tokenized:
    """Writes the tokens of each row's text as Arrow files of a column `tokens`, which `Windows` and `Packed` map.

    A part is there as a whole or not at all: what is killed goes on, and several processes share the work.

    Args:
        tokenizer: texts to their tokens.
        end: a token that is put after each document that does not end with it.
        name: of the tokenizer: a folder begun with another one is refused.
        report: told the rows that are done.

    Raises:
        UsageError: the folder was begun with other settings.
        DataError: a row has no text there, or the disk is full.
    """
    arrow = library("pyarrow", "tokenize")
    description = {
        "rows": len(corpus), "files": corpus.shards.facts(), "column": column, "end": end, "tokenizer": name,
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
    rows, tokens, there = 0, 0, 0
    for number, start in enumerate(starts):
        part = to / f"tokens-{number:06d}.arrow"
        with (to / f".{part.name}.lock").open("w") as lock:
            if not files.take_lock(lock) or part.is_file():
                there += 1
                continue
            stop = min(start + rows_per_part, len(corpus))
            sink = arrow.BufferOutputStream()
            with arrow.ipc.new_file(sink, arrow.schema([("tokens", kind)])) as writer:
                for first in range(start, stop, _BATCH_ROWS):
                    texts = [_text(corpus, place, column) for place in range(first, min(first + _BATCH_ROWS, stop))]
                    ids = [list(each) for each in tokenizer(texts)]
                    if end is not None:
                        ids = [each if each[-1:] == [end] else [*each, end] for each in ids]
                    writer.write_batch(arrow.record_batch([arrow.array(ids, kind)], names=["tokens"]))
                    rows, tokens = rows + len(ids), tokens + sum(map(len, ids))
                    report(first + len(ids))
            try:
                files.replace(part, sink.getvalue().to_pybytes(), durable=True)
            except OSError as error:
                raise DataError(
                    f"{part} cannot be written: {error.strerror or error}. The parts before it stay"
                ) from None
    return Tokenized(folder=to, parts=len(starts), rows=rows, tokens=tokens, were_there=there)


def _text(corpus: Corpus, place: int, column: str) -> str:
    row: Any = corpus.row(place)
    text = row.get(column) if isinstance(row, dict) else None
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    if text is None and isinstance(row, dict) and column in row:
        raise DataError(
            f"{corpus.name}: row {place:,} has a null in {column!r}: leave such rows out of the files first"
        )
    if not isinstance(text, str):
        names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{corpus.name}: row {place:,} has no text in {column!r}, but {names}: give --column")
    return text


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
    tokenizer.no_truncation()  # which its file may keep from a fine-tuning, for batches of samples
    tokenizer.no_padding()
    return lambda texts: [each.ids for each in tokenizer.encode_batch(list(texts))], hashlib.sha256(content).hexdigest()
