"""Defines Corpus: the rows of a folder of shards as a map-style dataset, and the order in which an epoch reads them."""

from __future__ import annotations

import bisect
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.utils.data import Dataset

from grappe.data.corpus.formats import Format, RowBlock, RowOptions
from grappe.data.corpus.index import CorpusIndex, Paths, find, open_index
from grappe.data.corpus.mixture import Mixture
from grappe.data.draw import mix, permute
from grappe.data.shards.selection import counts
from grappe.errors import DataError, TaskError
from grappe.errors.foreign_text import printable
from grappe.launch.rank import is_main_process
from grappe.launch.terminal import complain
from grappe.words import count_of

_WINDOW = 0x636F  # a word of the key, so that it is no epoch's
MOST_OPEN = 256
"""Files; a process may often have 1,024 open."""
MOST_DIRECT = 2048
"""Blocks of formats of which single rows are read: some kilobytes each."""


class Corpus(Dataset[Any]):
    """Rows of Parquet, Arrow, JSON lines (plain, gzip, zstd), token files or tar shards, read where they are.

    A row is a dictionary of its columns; of a token file a document, as an array. Files are indexed once, and nothing
    is rewritten. Where a format reads blocks (Parquet's row groups, a megabyte of compressed lines), an epoch takes
    blocks of `window` files at a time, and rows at random from `window` blocks; else rows in any order. Which, depends
    on the seed and the files alone.

    Args:
        paths: a folder, a glob, a file, or several of them; all files of one format.
        view: makes a sample of a row; default: the row itself. With an attribute `keyed = True` it draws no random
            numbers, and threads may load samples.
        columns: of Parquet and Arrow; the others are not read. Default: all.
        dtype: the type of the tokens in .bin files, such as "uint16".
        end: the token that ends a document in .bin files; without it each file is one document.
        window: blocks from which rows are mixed. A process keeps up to twice as many in memory.
        skip_damaged: whether to read everything when indexing, and leave out what cannot be read.

    Raises:
        DataError: no file is there, or one is damaged, or of another form than the first.
    """

    mix = Mixture

    def __init__(
        self,
        paths: Paths,
        view: Callable[[Any], Any] | None = None,
        *,
        columns: Sequence[str] | None = None,
        dtype: str | None = None,
        end: int | None = None,
        window: int = 8,
        skip_damaged: bool = False,
    ) -> None:
        if window < 1:
            raise TaskError(f"Corpus: window={window}: it must be at least 1")
        options = RowOptions(None if columns is None else tuple(columns), None if dtype is None else str(dtype), end)
        self._arguments: Mapping[str, Any] = {
            "columns": columns, "dtype": dtype, "end": end, "window": window, "skip_damaged": skip_damaged
        }  # fmt: skip
        self._paths = paths
        self.view, self.window = view, window
        self.shards = find(paths, options)
        alone = isinstance(paths, str | Path) and Path(paths).exists()
        self.name = Path(paths).resolve().name if alone else self.shards.root.name  # type: ignore[arg-type]
        """For mixtures and reports."""
        self.index: CorpusIndex = open_index(self.shards, skip_damaged=skip_damaged)
        self.direct = self.shards.form.direct
        """Whether single rows are read, and not blocks."""
        self._row_ends = np.cumsum(self.index.blocks["rows"], dtype=np.int64).tolist()
        if not len(self):
            raise DataError(f"{printable(self.shards.root)} has no rows, in {count_of(len(self.shards.names), 'file')}")
        self._facts = self.shards.facts()
        self._process, self._lock = os.getpid(), threading.RLock()
        self._opened: OrderedDict[int, Format] = OrderedDict()
        self._blocks: OrderedDict[int, tuple[Callable[[int], Any], Format, RowBlock]] = OrderedDict()
        if self.shards.left_out and is_main_process():
            complain(f"grappe: {printable(self.shards.root)}: left out: {counts(self.shards.left_out)}")
        if self.index.damaged and is_main_process():
            complain(
                f"grappe: {printable(self.shards.root)}: {len(self.index.damaged):,} damaged parts are left out, "
                f"the first: {printable(self.index.damaged[0])}"
            )

    def __len__(self) -> int:
        return self._row_ends[-1] if self._row_ends else 0

    def __getitem__(self, index: int) -> Any:
        row = self.row(index)
        return row if self.view is None else self.view(row)

    @property
    def keyed(self) -> bool:
        """Returns whether samples draw no random numbers, so that threads may load them."""
        return type(self) is Corpus and (self.view is None or getattr(self.view, "keyed", False) is True)

    def sample(self, index: int, key: int) -> Any:
        """Returns a sample; threads may call it at once."""
        return self[index]

    def row(self, index: int) -> Any:
        """Returns a row as its file has it.

        Raises:
            DataError: it cannot be read, or its file changed after it was indexed.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect.bisect_right(self._row_ends, index)
        try:
            return self._block(number)[0](index - (self._row_ends[number - 1] if number else 0))
        except OSError as error:
            raise DataError(f"{printable(self.shards.root)}, row {index:,}: {error.strerror or error}") from None

    def _block(self, number: int) -> tuple[Callable[[int], Any], Format, RowBlock]:
        """Returns what gives a block's rows, its open file and where it is."""
        if self._process != os.getpid():  # open files are shared with the process that forked this one
            self._process, self._lock = os.getpid(), threading.RLock()
            self._opened, self._blocks = OrderedDict(), OrderedDict()
        with self._lock:
            if (there := self._blocks.get(number)) is not None:
                self._blocks.move_to_end(number)
                return there
            file, rows, start, size = self.index.blocks[number].item()
            path = self.shards.root / self.shards.names[file]
            places = None
            if len(self.index.places):
                first = self._row_ends[number] - rows + number  # each block before has one place more than rows
                places = self.index.places[first : first + rows + 1]
            opened = self._opened.pop(file, None) or self.shards.form(path, self.shards.options, self._facts[file])
            self._opened[file], block = opened, RowBlock(rows, start, size, places)
            # one that is unpacked holds megabytes, and no more than a window of them is read at a time
            if len(self._opened) > (2 * self.window if self.shards.form.sequential else MOST_OPEN):
                self._opened.popitem(last=False)
                if self.direct:  # they hold their files, many of them
                    self._blocks.clear()
            self._blocks[number] = there = opened.read(block), opened, block
            if len(self._blocks) > (MOST_DIRECT if self.direct else 2 * self.window):
                self._blocks.popitem(last=False)
            return there

    def tokens(self, number: int, column: str) -> tuple[Format, NDArray[Any], NDArray[Any]]:
        """Returns a block's open file, its tokens, mapped, and the places of its documents in them [rows + 1].

        Raises:
            DataError: the corpus has no such tokens.
        """
        _, opened, block = self._block(number)
        if (flat := opened.tokens(block, column)) is None:
            raise DataError(
                f"{printable(opened.file)} has no column {column!r} of lists of tokens that can be mapped: write them "
                "once, by grappe data tokenize"
            )
        return opened, *flat

    def memory(self) -> int:
        """Returns the bytes that a process takes at most for blocks, by the first one's; direct rows take none.

        They are those of blocks that are kept, of the largest once more while it is made, and of open files.
        """
        if self.direct:
            return 0
        kept, opened = 2 * self.window, self._block(0)[1]
        largest = np.sort(self.index.blocks["size"])[-kept:].astype(float)
        files = min(len(self.shards.names), kept if self.shards.form.sequential else MOST_OPEN)
        blocks = np.append(largest, largest[-1]) * opened.expansion + opened.slack
        return int(blocks.sum()) + files * opened.held

    def epoch_order(self) -> WindowedOrder | None:
        """Returns the order of an epoch's rows; None: any, as single rows are read."""
        blocks, sequential = self.index.blocks, self.shards.form.sequential
        return None if self.direct else WindowedOrder(blocks, self.window, sequential=sequential)

    def __reduce__(self) -> tuple[object, ...]:
        # Neither open files nor a mapped index can travel to another process: it opens them again.
        return functools.partial(Corpus, **self._arguments), (self._paths, self.view)


class WindowedOrder:
    """Order of rows that are read in blocks: blocks of `window` files by turns, rows mixed over `window` blocks.

    The blocks of a file whose text is compressed are cheap to read one after the other only; a Parquet file's are
    permuted among those of all files.
    """

    repeats = False

    def __init__(self, blocks: NDArray[np.void], window: int, *, sequential: bool) -> None:
        self._window = window
        rows = blocks["rows"].astype(np.int64)
        self._rows, self._first = rows, np.cumsum(rows) - rows
        self.length = self.samples = int(rows.sum())
        # Parts of blocks that are read in order: files, or each block for itself.
        parts = blocks["file"].astype(np.int64) if sequential else np.arange(len(rows))
        _, starts, counts = np.unique(parts, return_index=True, return_counts=True)
        self._in_part = np.arange(len(rows)) - np.repeat(starts, counts)
        self._parts = np.repeat(np.arange(len(starts)), counts)
        self._laid: tuple[tuple[int, int], NDArray[np.int64], NDArray[np.int64]] | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the blocks and the window."""
        digest = xxhash.xxh3_64(repr(self._window).encode())
        digest.update(self._rows.tobytes())
        digest.update(self._parts.tobytes())
        return digest.hexdigest()

    def order(self, seed: int, epoch: int, start: int, stop: int, batch_size: int) -> NDArray[np.int64]:
        """Returns the ids at positions `start` to `stop` of an epoch's order: int64 (stop - start,)."""
        return self.at(seed, epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ids at any positions of an epoch's order: int64 (n,)."""
        if self._laid is None or self._laid[0] != (seed, epoch):
            count = int(self._parts[-1]) + 1
            turns = permute(np.arange(count, dtype=np.int64), key=mix(seed, epoch, _WINDOW), length=count)
            turn = turns[self._parts]
            order = np.lexsort((turn, self._in_part, turn // self._window))
            self._laid = (seed, epoch), order, np.cumsum(self._rows[order])
        _, blocks, ends = self._laid  # an epoch's blocks in order, and the number of rows up to the end of each
        window_ends = ends[self._window - 1 :: self._window]
        if not len(window_ends) or window_ends[-1] != self.length:
            window_ends = np.append(window_ends, self.length)
        windows = np.searchsorted(window_ends, positions, side="right")
        places = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            here = windows == window
            begin = int(window_ends[window - 1]) if window else 0
            rows = int(window_ends[window]) - begin
            places[here] = begin + permute(positions[here] - begin, key=mix(seed, epoch, _WINDOW, window), length=rows)
        number = np.searchsorted(ends, places, side="right")
        chosen = blocks[number]
        return self._first[chosen] + places - (ends[number] - self._rows[chosen])
