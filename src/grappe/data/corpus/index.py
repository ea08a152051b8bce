"""Finds the files of a corpus, and keeps where their blocks and rows are as one mapped file."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from grappe.data.corpus.formats import FORMATS, Damaged, Format, RowBlock, RowOptions
from grappe.data.shards import index as index_file
from grappe.data.shards.open_file import Facts, facts_below
from grappe.data.shards.selection import LeftOut, leave_out, refuse_gaps, refuse_splits, split_of
from grappe.errors import DataError, TaskError, nearest
from grappe.errors.foreign_text import printable
from grappe.launch.files import read_bytes
from grappe.launch.terminal import complain
from grappe.words import count_of

Paths = str | Path | Sequence[str | Path]

BLOCK = np.dtype([("file", "<u4"), ("rows", "<u4"), ("start", "<u8"), ("size", "<u8")])
PLACE = np.dtype("<u8")
_HIDDEN = (".", "_")
_OF_DATASETS = ("state.json", "dataset_info.json")
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
    left_out: LeftOut = dataclasses.field(default_factory=dict)
    """Files of the folders that are of no format, or not listed; hidden ones are not counted."""

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

        return index_file.kept(
            self.root,
            index_file.places(self.root / f".{file}", "corpus", file),
            tuple[str, ...],
            kinds,
            lambda why: (facts_below(self.root, self.names), *make()),
            lambda names, words, arrays: (words, arrays),
            again=again,
        )


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
    chosen: dict[Path, str] = {}
    left_out = LeftOut()
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
            if not match.is_dir():
                if not match.is_file():
                    raise DataError(f"{printable(match)}: there is no such file or folder")
                if (ending := _ending_of(match.name)) is None:
                    raise DataError(f"{printable(match)}: its ending is of no format: {', '.join(FORMATS)}")
                chosen[match] = ending
                continue
            inside = {file: ending for file in _files_below(match, left_out) if (ending := _ending_of(file.name))}
            names = [str(file.relative_to(match)) for file in inside]
            refuse_splits(match, (split_of(part) for name in names for part in name.split("/")))
            refuse_gaps(match, names)
            chosen |= inside
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
    names = tuple(str(file.relative_to(root)) for file in files)
    return ShardFiles(root=root, names=names, form=form, options=options, left_out=left_out)


def _ending_of(name: str) -> str | None:
    """Returns the format's ending of a file's name; None if it is of no format."""
    return max((ending for ending in FORMATS if name.endswith(ending)), key=len, default=None)


def _files_below(folder: Path, left_out: LeftOut) -> Iterator[Path]:
    """Yields the files of formats below a folder; of one that Hugging Face's datasets saved, those that it lists."""
    for path, folders, names in os.walk(folder):
        here = Path(path)
        if "dataset_dict.json" in names:
            splits = ", ".join(str(here / name) for name in sorted(folders))
            raise DataError(f"{printable(here)} is a DatasetDict of several splits: name one of {printable(splits)}")
        listed = set(names)
        if listed.issuperset(_OF_DATASETS):
            try:
                state = msgspec.json.decode(read_bytes(here / "state.json", 100))
                listed = msgspec.convert({file["filename"] for file in state["_data_files"]}, set[str])
            except (msgspec.DecodeError, LookupError, TypeError):
                raise DataError(f"{printable(here / 'state.json')} is not what datasets.save_to_disk writes") from None
        folders[:] = [name for name in folders if not name.startswith(_HIDDEN)]
        for name in (*folders, *names):
            below = here / name
            if below.is_dir():
                if below.is_symlink():
                    leave_out(left_out, str(below.relative_to(folder)), "linked folders")
            elif not name.startswith(_HIDDEN) and name not in _OF_DATASETS:
                if name in listed and _ending_of(name) and below.is_file():
                    yield below
                else:
                    leave_out(left_out, str(below.relative_to(folder)))


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
    columns: dict[str, str] | None = None
    for number, name in enumerate(shards.names):
        report(f"indexing {name}: file {number + 1:,} of {len(shards.names):,}")
        try:
            opened, reader = (shards.form(shards.root / name, shards.options) for _ in range(2))
            columns = _same_columns(columns, opened.columns(), shards, name)
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


def _same_columns(before: dict[str, str] | None, its: dict[str, str], shards: ShardFiles, name: str) -> dict[str, str]:
    """Returns the columns of the files so far with those of one more; a file that differs is never left out."""
    for column in shards.options.columns or () if its else ():
        if column not in its:
            raise DataError(f"{printable(shards.root / name)} has no column {column!r}: {nearest(column, list(its))}")
    its = {column: its[column] for column in shards.options.columns or its if column in its}
    if before is None:
        return its
    for column in sorted(before.keys() | its.keys()):
        there, here = before.get(column, "missing"), its.get(column, "missing")
        if here != there and "null" not in (here, there):
            raise DataError(
                f"{printable(shards.root / name)}: the column {printable(column)!r} is {here} and in the files before "
                f"{there}. The files are whole: read columns that all have, Corpus(…, columns=[…]), or convert it"
            )
    return before | {column: kind for column, kind in its.items() if kind != "null"}


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
