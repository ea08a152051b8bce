"""Formats of shards: lists the blocks and rows of a file once, and reads a block's rows. Nothing is unpickled.

A format whose rows can be read one by one is *direct*; of the others a block is read as a whole.
"""

from __future__ import annotations

import gzip
import importlib
import os
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from grappe.data.images.tar import BLOCK as TAR_BLOCK
from grappe.data.images.tar import Extent, members
from grappe.errors import DataError, TaskError
from grappe.errors.foreign_text import printable

BLOCK_BYTES = 1 << 20
"""Of a compressed file's text that make a block."""
MOST_ROW = 1 << 26
"""Bytes of a line of text, or of a tar shard's row."""
MOST_GROUP = 1 << 32
"""Bytes of a Parquet row group, unpacked."""
MOST_RATIO = 5_000
"""Of a file's unpacked bytes to its own: real text has less than 30."""
MOST_WINDOW = 1 << 27
"""Bytes that a zstd file may have its reader keep: what `zstd -d` allows."""
CHANGED = "it changed after it was indexed"
_READ = 1 << 23
_PACKED = 1 << 12  # bytes of zstd that are unpacked at once: at most 128 MB


class RowBlock(NamedTuple):
    """Rows that are read together."""

    rows: int
    start: int
    """The number of a row group or record batch, or the first byte in the (unpacked) file."""
    size: int
    """Bytes in memory."""


class Damaged(Exception):
    """A file, or a block of it, cannot be read; `str(error)` says why."""


class Format(ABC):
    """A file of a format, open in this process.

    Raises:
        Damaged: it is no such file.
    """

    direct: ClassVar[bool] = False
    """Whether single rows are read without their block."""
    sequential: ClassVar[bool] = False
    """Whether a file's blocks are quick to read in their order alone."""

    def __init__(self, file: Path, options: RowOptions) -> None:
        self.file, self.options = file, options

    @abstractmethod
    def blocks(self) -> Iterator[tuple[RowBlock, NDArray[np.uint64] | None]]:
        """Yields the file's blocks in order, and of a direct format with an index of rows where each row starts."""

    def read(self, block: RowBlock) -> Any:
        """Returns a block's rows, each decoded when it is asked for."""
        raise NotImplementedError

    def row(self, start: int, stop: int) -> Any:
        """Returns the row at these bytes of the file, of a format with an index of rows."""
        raise NotImplementedError

    def tokens(
        self, block: RowBlock, column: str, places: NDArray[np.uint64]
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Returns all tokens that a block's are among, mapped, and where each document begins and ends in them."""
        return None

    def check(self) -> None:  # noqa: B027, mapped files alone are in danger
        """Raises Damaged if the file has changed since it was opened."""

    def schema(self) -> str:
        """Returns the names and types of the columns, "" where the format has none."""
        return ""


class RowOptions(NamedTuple):
    """Settings that decide what a row is."""

    columns: tuple[str, ...] | None = None
    dtype: str | None = None
    end: int | None = None


def library(module: str, what: str) -> Any:
    """Imports a library that reads a format.

    Raises:
        TaskError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise TaskError(f"{what} needs {module.partition('.')[0]}: pip install 'grappe[corpus]'") from None


class _Columns:
    """Rows of an Arrow table or record batch, as dictionaries; a list of numbers is an array that shares its memory."""

    def __init__(self, batch: Any) -> None:
        self._columns = {name: _getter(batch.column(name)) for name in batch.schema.names}

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {name: get(place) for name, get in self._columns.items()}


def _getter(column: Any) -> Callable[[int], Any]:
    values = flat_lists(column)
    if values is None:
        return lambda place: column[place].as_py()
    flat, ends = values
    return lambda place: flat[ends[place] : ends[place + 1]]


def flat_lists(column: Any) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """Returns the numbers of a column of lists and where each list begins and ends [rows + 1]; None: it is none."""
    arrow = library("pyarrow", "Arrow")
    kind = column.type
    if not (arrow.types.is_list(kind) or arrow.types.is_large_list(kind)):
        return None
    number = arrow.types.is_integer(kind.value_type) or arrow.types.is_floating(kind.value_type)
    if not number or column.null_count or (hasattr(column, "num_chunks") and column.num_chunks != 1):
        return None
    array = column.chunk(0) if hasattr(column, "num_chunks") else column
    if array.values.null_count:
        return None
    return array.values.to_numpy(zero_copy_only=True), array.offsets.to_numpy(zero_copy_only=True)


class Parquet(Format):
    """A Parquet file: a block is a row group."""

    def __init__(self, file: Path, options: RowOptions) -> None:
        super().__init__(file, options)
        self._arrow = library("pyarrow.parquet", "Parquet")
        try:
            self._opened = self._arrow.ParquetFile(file, memory_map=False)
        except Exception as error:
            raise Damaged(_sentence(error)) from None

    def schema(self) -> str:
        return _schema(self._opened.schema_arrow)

    def blocks(self) -> Iterator[tuple[RowBlock, None]]:
        metadata = self._opened.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if not 0 <= group.total_byte_size <= MOST_GROUP:
                raise Damaged(
                    f"its row group {number} asks for {group.total_byte_size / 1e9:,.1f} GB of memory, of at most "
                    f"{MOST_GROUP / 1e9:.1f}: write it with smaller ones (row_group_size=)"
                )
            yield RowBlock(group.num_rows, number, group.total_byte_size), None

    def read(self, block: RowBlock) -> Any:
        columns = None if self.options.columns is None else list(self.options.columns)
        try:
            table = self._opened.read_row_group(block.start, columns=columns, use_threads=False).combine_chunks()
        except Exception as error:
            raise Damaged(f"row group {block.start}: {_sentence(error)}") from None
        if table.num_rows != block.rows:
            raise Damaged(f"row group {block.start} has {table.num_rows:,} rows of {block.rows:,}")
        return _Columns(table)


class Arrow(Format):
    """An Arrow file or stream, mapped: a block is a record batch, which is in memory as it is in the file."""

    direct = True

    def __init__(self, file: Path, options: RowOptions) -> None:
        super().__init__(file, options)
        arrow = library("pyarrow", "Arrow")
        try:
            mapped, before = arrow.memory_map(str(file)), arrow.total_allocated_bytes()
            try:
                reader = arrow.ipc.open_file(mapped)
                self._batches = []
                for number in range(reader.num_record_batches):
                    self._batches.append(reader.get_batch(number))
                    if arrow.total_allocated_bytes() > before:
                        raise Damaged("its record batches are compressed: write it without, or as Parquet")
            except arrow.ArrowInvalid:
                mapped.seek(0)
                reader = arrow.ipc.open_stream(mapped)
                self._batches = list(reader)
            self._schema = reader.schema
        except Damaged:
            raise
        except Exception as error:
            raise Damaged(_sentence(error)) from None

    def schema(self) -> str:
        return _schema(self._schema)

    def blocks(self) -> Iterator[tuple[RowBlock, None]]:
        for number, batch in enumerate(self._batches):
            try:
                batch.validate()
            except Exception as error:
                raise Damaged(f"record batch {number}: {_sentence(error)}") from None
            yield RowBlock(batch.num_rows, number, batch.get_total_buffer_size()), None

    def read(self, block: RowBlock) -> Any:
        batch = self._batches[block.start]
        return _Columns(batch.select(list(self.options.columns)) if self.options.columns else batch)

    def tokens(
        self, block: RowBlock, column: str, places: NDArray[np.uint64]
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        return flat_lists(self._batches[block.start].column(column))


class _Bytes(Format):
    """A file whose rows are read by their places."""

    direct = True

    def __init__(self, file: Path, options: RowOptions) -> None:
        super().__init__(file, options)
        self._handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._facts = facts_of(self._handle)

    def row(self, start: int, stop: int) -> Any:
        """Returns the row at these bytes."""
        self.check()
        return self._row(start, stop)

    def check(self) -> None:
        # a mapped file that gets shorter would end the process
        if facts_of(self._handle) != self._facts:
            raise Damaged(CHANGED)

    @abstractmethod
    def _row(self, start: int, stop: int) -> Any: ...

    def __del__(self) -> None:
        if (handle := getattr(self, "_handle", None)) is not None:
            os.close(handle)


class JsonLines(_Bytes):
    """A text file with a JSON object in each line; blank lines are no rows."""

    def blocks(self) -> Iterator[tuple[RowBlock, NDArray[np.uint64]]]:
        begin, starts, last = 0, [np.zeros(1, np.uint64)], b"\n"
        while content := os.pread(self._handle, _READ, begin):
            feeds = np.flatnonzero(np.frombuffer(content, np.uint8) == 10).astype(np.uint64)
            starts.append(feeds + np.uint64(begin + 1))
            begin, last = begin + len(content), content[-1:]
        ends = np.concatenate([*starts, np.array([begin] * (last != b"\n"), np.uint64)])
        lengths = np.diff(ends)
        if len(lengths) and lengths.max() > MOST_ROW:
            raise Damaged(f"a line of {int(lengths.max()):,} bytes, of at most {MOST_ROW:,}")
        full = lengths > 1
        if len(lengths) and (short := np.flatnonzero(lengths == 2)).size:  # a blank line of Windows'
            full[[place for place in short if os.pread(self._handle, 2, int(ends[place])) == b"\r\n"]] = False
        rows = ends[:-1][full]
        yield RowBlock(len(rows), 0, begin), np.append(rows, np.uint64(begin))

    def _row(self, start: int, stop: int) -> Any:
        content = os.pread(self._handle, stop - start, start)
        return _decoded(content.partition(b"\n")[0], f"the line at byte {start:,}")


def _decoded(line: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{where} is no JSON ({_sentence(error)})") from None


class _Lines:
    """Lines of a block, each decoded when it is asked for."""

    def __init__(self, lines: list[bytes], block: RowBlock) -> None:
        self._lines, self._block = lines, block

    def __getitem__(self, place: int) -> Any:
        return _decoded(self._lines[place], f"line {place} of the block at unpacked byte {self._block.start:,}")


class Compressed(Format):
    """JSON lines by gzip or zstd: a block is a megabyte of lines, and blocks are quick to read in order alone."""

    sequential = True

    def __init__(self, file: Path, options: RowOptions) -> None:
        super().__init__(file, options)
        self._stream: Any = None
        self._at = 0

    def blocks(self) -> Iterator[tuple[RowBlock, None]]:
        self._begin()
        rest, most = b"", MOST_RATIO * max(1 << 16, self.file.stat().st_size)
        while True:
            content = self._unpacked(BLOCK_BYTES)
            text = rest + content
            if self._at > most:
                raise Damaged(f"it unpacks to more than {MOST_RATIO:,} times its size: a decompression bomb")
            end = text.rfind(b"\n") + 1 if content else len(text)
            if len(text) - end > MOST_ROW:
                raise Damaged(f"a line of more than {MOST_ROW:,} bytes, unpacked")
            if end:
                yield RowBlock(len(_rows(text[:end])), self._at - len(text), end), None
            if not content:
                return
            rest = text[end:]

    def read(self, block: RowBlock) -> Any:
        if self._stream is None or self._at > block.start:
            self._begin()
        while self._at < block.start:
            if not self._unpacked(min(BLOCK_BYTES, block.start - self._at)):
                raise Damaged(CHANGED)
        content = b"".join(iter(lambda: self._unpacked(block.start + block.size - self._at), b""))
        rows = _rows(content)
        if len(rows) != block.rows:
            raise Damaged(CHANGED)
        return _Lines(rows, block)

    def _begin(self) -> None:
        self._at = 0
        if self.file.name.endswith(".gz"):
            self._stream = gzip.GzipFile(self.file)
        else:
            self._stream = _Zstd(self.file)

    def _unpacked(self, size: int) -> bytes:
        if not size:
            return b""
        try:
            content = self._stream.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise Damaged(f"it is cut off or damaged: {_sentence(error)}") from None
        self._at += len(content)
        return content


class _Zstd:
    """Reads the frames of a zstd file; unlike the library's own reader it notices where the last one is cut off."""

    def __init__(self, file: Path) -> None:
        self._library = library("zstandard", "zstd")
        self._unpacker = self._library.ZstdDecompressor(max_window_size=MOST_WINDOW)
        self._file = file.open("rb")
        self._frame: Any = None
        self._ready = bytearray()
        self._packed = b""

    def read(self, size: int) -> bytes:
        """Returns `size` bytes, fewer at the end.

        Raises:
            OSError: the file is cut off, or damaged.
        """
        try:
            while len(self._ready) < size:
                packed = self._packed or self._file.read(_PACKED)
                if not packed:
                    if self._frame is not None:
                        raise OSError("its last frame has no end")
                    break
                self._frame = self._frame or self._unpacker.decompressobj()
                self._ready += self._frame.decompress(packed)
                self._packed = self._frame.unused_data if self._frame.eof else b""
                if self._frame.eof:
                    self._frame = None
        except self._library.ZstdError as error:
            raise OSError(str(error)) from None
        content = bytes(self._ready[:size])
        del self._ready[:size]
        return content


def _rows(text: bytes) -> list[bytes]:
    return [line for line in text.split(b"\n") if line and line != b"\r"]


class Tokens(_Bytes):
    """A file of nothing but tokens of one type: a row is a document, or without `end` the whole file."""

    def __init__(self, file: Path, options: RowOptions) -> None:
        super().__init__(file, options)
        self.kind = np.dtype(options.dtype)
        size = self._facts[0]
        if size % self.kind.itemsize:
            raise Damaged(f"{size:,} bytes are no whole number of {self.kind.name}: cut off, or of another dtype")
        # slices of a plain array take half the time of a memmap's
        self.map = np.asarray(np.memmap(file, self.kind, mode="r") if size else np.empty(0, self.kind))
        """All tokens, mapped."""

    def blocks(self) -> Iterator[tuple[RowBlock, NDArray[np.uint64]]]:
        if not len(self.map):
            return
        ends = [np.zeros(1, np.uint64)]
        if self.options.end is not None:
            for first in range(0, len(self.map), _READ):
                places = np.flatnonzero(self.map[first : first + _READ] == self.options.end)
                ends.append((places + (first + 1)).astype(np.uint64))
        starts = np.concatenate(ends)
        if int(starts[-1]) != len(self.map):
            starts = np.append(starts, np.uint64(len(self.map)))
        yield RowBlock(len(starts) - 1, 0, 0), starts * np.uint64(self.kind.itemsize)

    def _row(self, start: int, stop: int) -> Any:
        return self.map[start // self.kind.itemsize : stop // self.kind.itemsize]

    def tokens(
        self, block: RowBlock, column: str, places: NDArray[np.uint64]
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        return self.map, places // np.uint64(self.kind.itemsize)


class Tar(_Bytes):
    """A tar shard in WebDataset's form: a row is the neighbours of one key, by their endings."""

    def blocks(self) -> Iterator[tuple[RowBlock, NDArray[np.uint64]]]:
        starts, before, end = list[int](), b"", 0
        for member in self._members(0):
            key = _key(member.name)[0]
            if key != before or not starts:
                starts.append(end)
            before, end = key, member.offset + -(-member.size // TAR_BLOCK) * TAR_BLOCK
        yield RowBlock(len(starts), 0, self._facts[0]), np.array([*starts, end], np.uint64)

    def _row(self, start: int, stop: int) -> Any:
        row: dict[str, Any] = {}
        for member in self._members(start):
            if member.offset >= stop:
                break
            if member.size > MOST_ROW:
                raise Damaged(f"a member of {member.size:,} bytes, of at most {MOST_ROW:,}")
            key, ending = _key(member.name)
            row["__key__"] = key.decode(errors="replace")
            row[ending.decode(errors="replace")] = os.pread(self._handle, member.size, member.offset)
        return row

    def _members(self, start: int) -> Iterator[Any]:
        try:
            yield from members(Extent(self._handle, printable(self.file.name), start, self._facts[0]))
        except DataError as error:
            raise Damaged(str(error)) from None


def _key(name: bytes) -> tuple[bytes, bytes]:
    """Cuts a member's name into the key of its row and its ending."""
    folder, slash, base = name.rpartition(b"/")
    stem, _, ending = base.partition(b".")
    return folder + slash + stem, ending


FORMATS: dict[str, type[Format]] = {
    ".parquet": Parquet,
    ".arrow": Arrow,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".jsonl.gz": Compressed,
    ".jsonl.zst": Compressed,
    ".tar": Tar,
    ".bin": Tokens,
}
"""By the end of a file's name."""


Facts = tuple[int, int]
"""A file's size, and its modification time in nanoseconds."""


def facts_of(file: Path | int) -> Facts:
    """Returns the facts of a file, or of one that is open."""
    status = os.fstat(file) if isinstance(file, int) else file.stat()
    return status.st_size, status.st_mtime_ns


class OpenFiles:
    """Files of a corpus that this process has open; a process that is forked opens its own."""

    def __init__(self, form: type[Format], options: RowOptions, facts: Mapping[Path, Facts], most: int) -> None:
        self._form, self._options, self._facts, self._most = form, options, facts, most
        self._open: dict[Path, Format] = {}
        self._process, self.lock = os.getpid(), threading.RLock()

    def get(self, file: Path) -> Format:
        """Opens a file, or returns it as it is open; the one that was not asked for longest is closed.

        Raises:
            Damaged: it cannot be read, or is not as `facts` say.
        """
        if self._process != os.getpid():
            self._process, self.lock, self._open = os.getpid(), threading.RLock(), {}
        opened = self._open.pop(file, None)
        if opened is None:
            if facts_of(file) != self._facts[file]:
                raise Damaged(CHANGED)
            opened = self._form(file, self._options)
        self._open[file] = opened
        while len(self._open) > self._most:
            self._open.pop(next(iter(self._open)))  # closed with its last reference
        return opened


def _schema(schema: Any) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _sentence(error: BaseException) -> str:
    return printable(str(error).partition("\n")[0].rstrip(".")) or type(error).__name__
