"""Finds the files of a corpus, and keeps where their blocks and rows are as one mapped file."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from grappe.data.corpus.formats import FORMATS, Damaged, Format, RowBlock, RowOptions
from grappe.data.shards import index as index_file
from grappe.data.shards.open_file import Facts, facts_below
from grappe.errors import DataError, TaskError, nearest
from grappe.errors.foreign_text import printable
from grappe.launch.terminal import complain
from grappe.words import count_of

Paths = str | Path | Sequence[str | Path]

BLOCK = np.dtype([("file", "<u4"), ("rows", "<u4"), ("start", "<u8"), ("size", "<u8")])
PLACE = np.dtype("<u8")
WordsAndArrays = tuple[tuple[str, ...], Sequence[NDArray[Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFiles:
    """The files of a corpus, in the order of their names, all of one format."""

    root: Path
    """The folder that all of them are in."""
    names: tuple[str, ...]
    """Below the root."""
    form: type[Format]
    options: RowOptions

    def facts(self) -> tuple[Facts, ...]:
        """Returns the facts of each file, as they are now."""
        return tuple(facts_below(self.root, self.names).values())

    def kept(
        self, name: str, kinds: Sequence[np.dtype[Any]], make: Callable[[], WordsAndArrays], *, again: bool = False
    ) -> tuple[WordsAndArrays, Path]:
        """Keeps what is made of the files: hidden beside them, or in the user's folder."""
        what = [str(self.root), *self.names, self.form.__name__, repr(self.options)]
        key = xxhash.xxh3_64_hexdigest("\n".join(what).encode(errors="surrogateescape"))
        file = f"{key}-{name}.grappe.npy"

        def described(why: str) -> index_file.Made:
            facts = facts_below(self.root, self.names)
            return facts, *make()

        def checked(names: tuple[str, ...], words: tuple[str, ...], arrays: list[NDArray[Any]]) -> WordsAndArrays:
            return words, arrays

        places = index_file.places(self.root / f".{file}", "corpus", file)
        return index_file.kept(self.root, places, tuple[str, ...], kinds, described, checked, again=again)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusIndex:
    """Blocks and rows of a corpus of N rows and F files."""

    blocks: NDArray[np.void]
    """[B] of `BLOCK`, none without rows."""
    places: NDArray[np.uint64]
    """[N + B] where rows are found by their places (`RowBlock.places`), else empty."""
    damaged: tuple[str, ...]
    """Parts that were left out, with the reason."""
    file: Path | None = None


def find(paths: Paths, options: RowOptions) -> ShardFiles:
    """Lists the files of folders, globs and names.

    Raises:
        DataError: there is none, they are of several formats, or `grappe fetch` has not finished one.
        TaskError: tokens without their type.
    """
    asked = [paths] if isinstance(paths, str | Path) else list(paths)
    endings = sorted(FORMATS, key=len, reverse=True)
    chosen: dict[Path, str] = {}
    for path in (str(Path(each).expanduser().absolute()) for each in asked):
        is_pattern = glob.has_magic(path) and not Path(path).exists()
        matches = sorted(glob.glob(path, recursive=True)) if is_pattern else [path]  # noqa: PTH207, absolute patterns
        beside = str(Path(path).with_name(f".{Path(path).name}"))
        for pattern in (beside, *(f"{glob.escape(match)}/**/.*" for match in matches)):
            for unfinished in glob.glob(f"{pattern}.part", recursive=True):  # noqa: PTH207, absolute patterns
                raise DataError(
                    f"{printable(unfinished)}: grappe fetch has not finished this file, and the corpus would lack its "
                    "rows: give the same command again, or remove what it left"
                )
        if not matches:
            raise DataError(f"{printable(path)}: no file has such a name")
        for match in map(Path, matches):
            for file in sorted(match.rglob("*")) if match.is_dir() else [match]:
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


def open_index(
    shards: ShardFiles, *, skip_damaged: bool, again: bool = False, report: Callable[[str], None] = lambda words: None
) -> CorpusIndex:
    """Returns the index of a corpus, mapped; makes it where it is missing or stale.

    Args:
        skip_damaged: whether to read everything, and leave out what cannot be read.
        again: whether to make it in any case.

    Raises:
        DataError: a file is damaged or has another schema than the first, or the index can be written nowhere.
    """

    def make() -> WordsAndArrays:
        complain(f"grappe: indexing {count_of(len(shards.names), 'file')} of {printable(shards.root)}, once")
        made = scan(shards, skip_damaged=skip_damaged, report=report)
        return made.damaged, (made.blocks, made.places)

    name = "skip" if skip_damaged else "all"
    (damaged, (blocks, places)), file = shards.kept(f"{name}.corpus", (BLOCK, PLACE), make, again=again)
    return CorpusIndex(blocks=blocks, places=places, damaged=damaged, file=file)


def scan(shards: ShardFiles, *, skip_damaged: bool, report: Callable[[str], None]) -> CorpusIndex:
    """Lists the blocks of all files.

    Raises:
        DataError: a file is damaged, or has another schema than the first.
    """
    blocks: list[tuple[int, int, int, int]] = []
    places: list[NDArray[np.uint64]] = []
    damaged: list[str] = []
    columns: tuple[str, ...] | None = None
    for number, name in enumerate(shards.names):
        report(f"indexing {name}: file {number + 1:,} of {len(shards.names):,}")
        try:
            opened, reader = (shards.form(shards.root / name, shards.options) for _ in range(2))
            if columns is None:
                columns = opened.columns()
                _check_columns(columns, shards)
            elif opened.columns() != columns:
                its = f"({', '.join(opened.columns())})"
                raise opened.damaged(f"its columns are {its}, and those of {shards.names[0]} ({', '.join(columns)})")
            for block in opened.blocks():
                readable, bad = _readable(reader, block) if skip_damaged and block.rows else (block, [])
                damaged += (f"{name}: {reason}" for reason in bad)
                if readable.rows:
                    blocks.append((number, readable.rows, block.start, block.size))
                    places += [] if readable.places is None else [readable.places]
        except Damaged as error:
            if not skip_damaged:
                raise
            damaged.append(f"{name}: {error.reason}")
    laid = np.concatenate(places) if places else np.empty(0, PLACE)
    return CorpusIndex(blocks=np.array(blocks, BLOCK), places=laid, damaged=tuple(damaged))


def _check_columns(columns: tuple[str, ...], shards: ShardFiles) -> None:
    names = [column.partition(" ")[0] for column in columns]
    for column in shards.options.columns or () if names else ():
        if column not in names:
            raise DataError(f"{printable(shards.root)} has no column {column!r}: {nearest(column, names)}")


def _readable(opened: Format, block: RowBlock) -> tuple[RowBlock, list[str]]:
    """Reads a block; returns it without rows that cannot be read, or empty where rows have no places; and why."""
    kept, bad = list[int](), list[str]()
    try:
        row = opened.read(block)
    except Damaged as error:
        return block._replace(rows=0), [error.reason]
    for place in range(block.rows):
        try:
            row(place)
            kept.append(place)
        except Damaged as error:
            bad.append(error.reason)
            if block.places is None:
                return block._replace(rows=0), bad
    if bad and block.places is not None:
        block = block._replace(rows=len(kept), places=np.append(block.places[kept], block.places[-1:]))
    return block, bad
