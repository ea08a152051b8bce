"""Finds the files of a corpus, and keeps where their blocks and rows are as one mapped file."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from grappe.data import index_file
from grappe.data.corpus.formats import FORMATS, Damaged, Facts, Format, RowBlock, RowOptions, facts_of
from grappe.data.index_file import Stale
from grappe.errors import DataError, TaskError, nearest, reading
from grappe.errors.foreign_text import printable
from grappe.launch.files import locked, state_folder
from grappe.launch.terminal import complain

Paths = str | Path | Sequence[str | Path]

BLOCK = np.dtype([("file", "<u4"), ("rows", "<u4"), ("start", "<u8"), ("size", "<u8")])
VERSION = 1
INDEX = ".corpus.grappe.npy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFiles:
    """The files of a corpus, in the order of their names, all of one format."""

    root: Path
    """The folder that all of them are in."""
    names: tuple[str, ...]
    """Below the root."""
    form: type[Format]
    options: RowOptions

    @property
    def key(self) -> str:
        """A hash of what is to be indexed and how."""
        what = [str(self.root), *self.names, self.form.__name__, repr(self.options)]
        return xxhash.xxh3_64_hexdigest("\n".join(what).encode(errors="surrogateescape"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusIndex:
    """Blocks and rows of a corpus of N rows and F files."""

    blocks: NDArray[np.void]
    """[B] of `BLOCK`, none without rows."""
    places: NDArray[np.uint64]
    """[N + F]: where each row of a file begins, and where its last one ends; empty where blocks are read instead."""
    direct: bool
    facts: tuple[Facts, ...]
    """Of each file, when it was indexed."""
    damaged: tuple[str, ...]
    """Parts that were left out, with the reason."""


class _CorpusDescription(msgspec.Struct, kw_only=True):
    version: int
    key: str
    facts: tuple[Facts, ...]
    blocks: int
    places: int
    direct: bool
    damaged: tuple[str, ...]


def find(paths: Paths, options: RowOptions) -> ShardFiles:
    """Lists the files of folders, globs and names.

    Raises:
        DataError: there is none, or they are of several formats.
        TaskError: tokens without their type.
    """
    asked = [paths] if isinstance(paths, str | Path) else list(paths)
    endings = sorted(FORMATS, key=len, reverse=True)
    chosen: dict[Path, str] = {}
    for path in (str(Path(each).expanduser().absolute()) for each in asked):
        is_pattern = glob.has_magic(path) and not Path(path).exists()
        matches = sorted(glob.glob(path, recursive=True)) if is_pattern else [path]  # noqa: PTH207, absolute patterns
        if not matches:
            raise DataError(f"{printable(path)}: no file has such a name")
        for match in map(Path, matches):
            inside = sorted(match.rglob("*")) if match.is_dir() else [match]
            for file in inside:
                ending = next((each for each in endings if file.name.endswith(each)), None)
                hidden = any(part.startswith((".", "_")) for part in file.relative_to(match).parts)
                if match.is_dir() and (ending is None or hidden or not file.is_file()):
                    continue
                if not file.is_file():
                    raise DataError(f"{printable(file)}: there is no such file or folder")
                if ending is None:
                    raise DataError(f"{printable(file)}: its ending is of no format: {', '.join(FORMATS)}")
                chosen[file] = ending
    if not chosen:
        raise DataError(f"{printable(asked[0])} has no file that ends in {', '.join(FORMATS)}")
    forms = {FORMATS[ending]: ending for ending in chosen.values()}
    if len(forms) > 1:
        raise DataError(
            f"{printable(asked[0])} has files of several formats ({', '.join(forms.values())}): make a Corpus of each, "
            "by a glob such as '*.parquet', and mix them"
        )
    (form,) = forms
    if (form is FORMATS[".bin"]) != (options.dtype is not None):
        raise TaskError("Corpus: files of tokens (.bin) need dtype=, such as dtype='uint16', and no others have one")
    files = sorted(chosen)
    root = files[0].parent if len(files) == 1 else Path(os.path.commonpath(files))
    return ShardFiles(root=root, names=tuple(str(file.relative_to(root)) for file in files), form=form, options=options)


def candidates(shards: ShardFiles, name: str) -> list[Path]:
    """Returns where a file about a corpus may lie, in order of preference: hidden beside its files."""
    folder = state_folder("corpus", make=True)
    return [shards.root / f".{name}", *([] if folder is None else [folder / name])]


def open_index(
    shards: ShardFiles, *, skip_damaged: bool, again: bool = False, report: Callable[[str], None] = lambda words: None
) -> tuple[CorpusIndex, Path]:
    """Returns the index of a corpus, mapped, and its file; makes it where it is missing or stale.

    Args:
        skip_damaged: whether to read everything, and leave out what cannot be read.
        again: whether to make it in any case.

    Raises:
        DataError: a file is damaged or has another schema than the first, or the index can be written nowhere.
    """
    key = f"{shards.key}{'-skip' if skip_damaged else ''}"
    places_of_index = candidates(shards, f"{key}{INDEX}")

    def existing() -> tuple[CorpusIndex, Path] | None:
        for file in (file for file in places_of_index if file.is_file()):
            with contextlib.suppress(Stale):
                return _read(file, shards, key), file
        return None

    if not again and (there := existing()) is not None:
        return there
    with locked(places_of_index[-1].with_suffix(".lock")):
        if not again and (there := existing()) is not None:  # another process has made it
            return there
        complain(f"grappe: indexing {len(shards.names):,} files of {printable(shards.root)}, once")
        index = scan(shards, skip_damaged=skip_damaged, report=report)
        description = _CorpusDescription(
            version=VERSION,
            key=key,
            facts=index.facts,
            blocks=len(index.blocks),
            places=len(index.places),
            direct=index.direct,
            damaged=index.damaged,
        )
        problems = []
        for file in places_of_index:
            try:
                index_file.write(file, msgspec.json.encode(description), (index.blocks, index.places))
                return _read(file, shards, key), file
            except OSError as error:
                problems.append(f"{file}: {error.strerror or error}")
            except Stale as error:
                raise DataError(f"{shards.root} changes while it is read ({error}): wait until it is whole") from None
        raise DataError(f"the index of {printable(shards.root)} can be written nowhere: {'; '.join(problems)}")


def _read(file: Path, shards: ShardFiles, key: str) -> CorpusIndex:
    text, rest = index_file.read(file)
    try:
        described = msgspec.json.decode(text, type=_CorpusDescription)
    except msgspec.DecodeError:
        raise Stale("it is damaged") from None
    if (described.version, described.key) != (VERSION, key):
        raise Stale("it is of something else")
    for name, earlier, now in zip(shards.names, described.facts, _facts(shards), strict=True):
        if earlier != now:
            raise Stale(f"{name} has changed since")
    if min(described.blocks, described.places) < 0:
        raise Stale("it is damaged")
    blocks, places = index_file.cut(rest, (described.blocks * BLOCK.itemsize, described.places * 8))
    index = CorpusIndex(
        blocks=blocks.view(BLOCK),
        places=places.view("<u8"),
        direct=described.direct,
        facts=described.facts,
        damaged=described.damaged,
    )
    if len(blocks) and index.blocks["file"].max() >= len(shards.names):
        raise Stale("it is damaged")
    return index


def _facts(shards: ShardFiles) -> tuple[Facts, ...]:
    facts = []
    for name in shards.names:
        with reading(shards.root / name):
            facts.append(facts_of(shards.root / name))
    return tuple(facts)


def scan(shards: ShardFiles, *, skip_damaged: bool, report: Callable[[str], None]) -> CorpusIndex:
    """Lists the blocks of all files.

    Raises:
        DataError: a file is damaged, or has another schema than the first.
    """
    blocks: list[tuple[int, int, int, int]] = []
    places: list[NDArray[np.uint64]] = []
    damaged: list[str] = []
    schema, facts = None, _facts(shards)
    for number, name in enumerate(shards.names):
        report(f"indexing {name}: file {number + 1:,} of {len(shards.names):,}")
        try:
            with reading(shards.root / name):
                opened, reader = (shards.form(shards.root / name, shards.options) for _ in range(2))
            if schema is None:
                schema = opened.schema()
                _check_columns(schema, shards)
            elif opened.schema() != schema:
                raise Damaged(f"its columns are ({opened.schema()}), and those of {shards.names[0]} ({schema})")
            for block, starts in opened.blocks():
                rows = (block, starts, []) if not skip_damaged else _readable(reader, block, starts)
                damaged += (f"{name}: {reason}" for reason in rows[2])
                if rows[0].rows:
                    blocks.append((number, rows[0].rows, block.start, block.size))
                    if rows[1] is not None:
                        places.append(rows[1])
        except Damaged as error:
            if not skip_damaged:
                raise DataError(
                    f"{printable(shards.root / name)}: {error}. Fetch it again; or leave out what cannot be read: "
                    f"Corpus(…, skip_damaged=True). All of it: grappe data check {printable(shards.root)}"
                ) from None
            damaged.append(f"{name}: {error}")
    laid = np.concatenate(places) if places else np.empty(0, np.uint64)
    return CorpusIndex(
        blocks=np.array(blocks, BLOCK), places=laid, direct=shards.form.direct, facts=facts, damaged=tuple(damaged)
    )


def _check_columns(schema: str, shards: ShardFiles) -> None:
    if shards.options.columns is None or not schema:
        return
    names = [column.partition(" ")[0] for column in schema.split(", ")]
    for column in shards.options.columns:
        if column not in names:
            raise DataError(f"{printable(shards.root)} has no column {column!r}: {nearest(column, names)}")


def _readable(
    opened: Format, block: RowBlock, starts: NDArray[np.uint64] | None
) -> tuple[RowBlock, NDArray[np.uint64] | None, list[str]]:
    """Reads a block completely; returns it without rows that cannot be read, or empty where rows have no places."""
    kept, bad = list[int](), list[str]()
    try:
        rows: Any = opened.read(block) if starts is None else ()
        for place in range(block.rows):
            try:
                opened.row(int(starts[place]), int(starts[place + 1])) if starts is not None else rows[place]
                kept.append(place)
            except Damaged as error:
                if starts is None:
                    raise
                bad.append(str(error))
    except Damaged as error:
        return block._replace(rows=0), None, [str(error)]
    if starts is not None and bad:
        starts = np.append(starts[kept], starts[-1:])
    return block._replace(rows=len(kept)), starts, bad
