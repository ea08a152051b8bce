"""Formats of shards: lists the blocks and rows of a file once, and reads a block's rows. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from grappe.data.shards.open_file import Facts, OpenFile
from grappe.data.shards.tar import Extent, Member, by_sample, members
from grappe.errors import DataError, GrappeError, TaskError, refuse_pointer
from grappe.errors.foreign_text import printable

BLOCK_BYTES = 1 << 20
"""Bytes of a compressed file's text in a block."""
MOST_ROW = 1 << 26
"""Bytes of a line of text, or of a tar shard's row."""
MOST_GROUP = 1 << 32
"""Bytes of a Parquet row group, unpacked."""
MOST_RATIO = 5_000
"""Largest ratio of a file's unpacked bytes to its own: real text has less than 30."""
_LLM_C = {np.int32(number).tobytes() for number in (20240520, 20240801)}  # karpathy/llm.c, dev/data/data_common.py
_LLM_C_HEADER = 1024  # bytes
_MEGATRON = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # megatron/core/datasets
_READ = 1 << 23
_UNPACKING = 5 << 18  # bytes: Arrow unpacks 1 MiB at a time, of 64 KiB that it reads, and gzip keeps 0.2 MB


class RowBlock(NamedTuple):
    """Rows that are read together."""

    rows: int
    start: int
    """The number of a row group or record batch, or the first byte in the (unpacked) file."""
    size: int
    """Bytes, without compression."""
    places: NDArray[np.uint64] | None = None
    """[rows + 1]: the byte (of a token file: the token) at which each row begins and the last one ends, where rows are
    found by it."""


class RowOptions(NamedTuple):
    """Settings that decide what a row is."""

    columns: tuple[str, ...] | None = None
    dtype: str | None = None
    end: int | None = None


class Damaged(DataError):
    """A file, or a part of it, cannot be read."""

    def __init__(self, file: Path, reason: str, remedy: str = "Fetch it again") -> None:
        self.reason = reason
        super().__init__(
            f"{printable(file)}: {reason}. {remedy}, or leave it out: Corpus(…, skip_damaged=True). "
            f"All that is damaged: grappe data check {printable(file.parent)}"
        )


class Format(ABC):
    """A file of a format, open in this process.

    Args:
        facts: when it was indexed.

    Raises:
        Damaged: it is no such file.
        DataError: it cannot be read, or has changed.
    """

    direct: ClassVar[bool] = False
    """Whether single rows are read without their block."""
    sequential: ClassVar[bool] = False
    """Whether a file's blocks are quick to read in their order alone."""
    expansion = 1.0
    """Bytes in memory of the last block that was read, to its `size`."""
    held = 0
    """Bytes that the open file takes in memory beyond its blocks."""
    slack: ClassVar[int] = 0
    """Bytes that each block takes beyond its own, as measured: allocators leave holes."""

    def __init__(self, file: Path, options: RowOptions, facts: Facts | None = None) -> None:
        self.file, self.options, self.opened = file, options, OpenFile(file)
        self.facts = facts or self.opened.facts
        self.check()
        refuse_pointer(self.opened.name, self.opened.read(64, 0))
        try:
            self.open()
        except GrappeError:
            raise
        except Exception as error:  # pyarrow's are of many kinds
            raise self.damaged(_sentence(error)) from None

    def check(self) -> None:
        """Raises DataError if the file has changed; one that is mapped and gets shorter would end the process."""
        if self.opened.facts != self.facts:
            raise self.changed()

    def changed(self) -> DataError:
        """Makes the error of a file that is another one now."""
        return DataError(
            f"{printable(self.file)} changed after it was indexed. Start again, which makes the index again"
        )

    def damaged(self, reason: str) -> Damaged:
        """Makes the error of bytes that cannot be read."""
        return Damaged(self.file, reason)

    def unfit(self, reason: str) -> Damaged:
        """Makes the error of a whole file that is written in a way that is not read."""
        return Damaged(self.file, reason, "Write it so")

    def open(self) -> None:  # noqa: B027, some formats need no more than the handle
        """Reads what the file says of itself."""

    def columns(self) -> dict[str, str]:
        """Returns the type of each column, as rows have it; none where the format has none."""
        return {}

    @abstractmethod
    def blocks(self) -> Iterator[RowBlock]:
        """Yields the file's blocks in order."""

    @abstractmethod
    def read(self, block: RowBlock) -> Callable[[int], Any]:
        """Returns what gives a row of a block by its place in it; it raises Damaged where there is none."""

    def tokens(self, block: RowBlock, column: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Returns tokens, mapped, that have the block's among them, and where each row begins and ends in them."""
        return None


def library(module: str, what: str) -> Any:
    """Imports a library that reads a format.

    Raises:
        TaskError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise TaskError(f"{what} needs {module.partition('.')[0]}: pip install 'grappe[corpus]'") from None


def _rows_of(batch: Any, opened: Format) -> Callable[[int], dict[str, Any]]:
    """Returns what gives the rows of a record batch: dictionaries; a list of numbers is an array in its memory."""
    getters = {name: _getter(batch.column(name)) for name in batch.schema.names}

    def row(place: int) -> dict[str, Any]:
        if opened.direct:
            opened.check()
        try:
            return {name: get(place) for name, get in getters.items()}
        except UnicodeDecodeError as error:
            raise opened.damaged(f"row {place} of a block is no text ({error.reason})") from None

    return row


def _getter(column: Any) -> Callable[[int], Any]:
    """Returns what gives a column's values; `as_py`, which all types have, takes several times as long."""
    types, kind = library("pyarrow", "Arrow").types, column.type
    if (lists := flat_lists(column)) is not None:
        flat, ends = lists
        return lambda place: flat[ends[place] : ends[place + 1]]
    if not column.null_count and (types.is_integer(kind) or types.is_floating(kind)):
        return column.to_numpy(zero_copy_only=True).item
    if not column.null_count and len(column) and (types.is_string(kind) or types.is_large_string(kind)):
        _, bounds, letters = (memoryview(each or b"") for each in column.buffers())
        stops = bounds.cast("i" if types.is_string(kind) else "q")[column.offset :]
        return lambda place: str(letters[stops[place] : stops[place + 1]], "utf-8")
    return lambda place: column[place].as_py()


def flat_lists(column: Any) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """Returns the numbers of a column of lists and where each list begins and ends [rows + 1]; None: it is none."""
    types, kind = library("pyarrow", "Arrow").types, column.type
    if not (types.is_list(kind) or types.is_large_list(kind)) or column.null_count:
        return None
    if not (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)) or column.values.null_count:
        return None
    return column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True)


class Parquet(Format):
    """A Parquet file: a block is a row group."""

    slack = 3 << 19

    def open(self) -> None:
        parquet = library("pyarrow.parquet", "Parquet")
        self._opened = parquet.ParquetFile(  # which would keep what it has buffered
            self.file, memory_map=False, pre_buffer=False, page_checksum_verification=True
        )

    def columns(self) -> dict[str, str]:
        return _columns(self._opened.schema_arrow)

    def blocks(self) -> Iterator[RowBlock]:
        for number in range(self._opened.metadata.num_row_groups):
            group = self._opened.metadata.row_group(number)
            self._check_size(number, group.total_byte_size)
            yield RowBlock(group.num_rows, number, group.total_byte_size)

    def _check_size(self, number: int, size: int) -> None:
        if not 0 <= size <= MOST_GROUP:
            raise self.unfit(
                f"row group {number} needs more than {MOST_GROUP / 1e9:.1f} GB of memory: smaller ones are read "
                "(row_group_size=)"
            )

    def read(self, block: RowBlock) -> Callable[[int], Any]:
        self.check()
        columns = None if self.options.columns is None else list(self.options.columns)
        batches, rows, size = list[Any](), 0, 0
        try:
            for batch in self._opened.iter_batches(1024, row_groups=[block.start], columns=columns, use_threads=False):
                batches.append(batch)
                rows, size = rows + batch.num_rows, size + batch.nbytes
                self._check_size(block.start, size)  # equal values take no room in the file
            if rows != block.rows:
                raise self.damaged(f"row group {block.start} has {rows:,} rows of {block.rows:,}")
            self.expansion = size / max(1, block.size)
            return _rows_of(library("pyarrow", "Parquet").concat_batches(batches), self)
        except Damaged:
            raise
        except Exception as error:
            raise self.damaged(f"row group {block.start}: {_sentence(error)}") from None


class Arrow(Format):
    """An Arrow file or stream, mapped: a block is a record batch, which is in memory as it is in the file."""

    direct = True

    def open(self) -> None:
        arrow = library("pyarrow", "Arrow")
        mapped, before = arrow.memory_map(str(self.file)), arrow.total_allocated_bytes()
        if self.opened.read(6, 0) == b"ARROW1":
            reader = arrow.ipc.open_file(mapped)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            batches = reader = arrow.ipc.open_stream(mapped)
        self._schema, self._batches = reader.schema, list[Any]()
        for batch in batches:
            self._batches.append(batch)
            if arrow.total_allocated_bytes() > before:
                raise self.unfit("its record batches are compressed: uncompressed ones are read, or Parquet")

    def columns(self) -> dict[str, str]:
        return _columns(self._schema)

    def blocks(self) -> Iterator[RowBlock]:
        for number, batch in enumerate(self._batches):
            try:
                batch.validate()
            except Exception as error:
                raise self.damaged(f"record batch {number}: {_sentence(error)}") from None
            yield RowBlock(batch.num_rows, number, batch.get_total_buffer_size())

    def read(self, block: RowBlock) -> Callable[[int], Any]:
        batch = self._batches[block.start]
        return _rows_of(batch.select(list(self.options.columns)) if self.options.columns else batch, self)

    def tokens(self, block: RowBlock, column: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        batch = self._batches[block.start]
        return flat_lists(batch.column(column)) if column in batch.schema.names else None


class _Placed(Format):
    """A file whose rows are read by their places."""

    direct = True

    def read(self, block: RowBlock) -> Callable[[int], Any]:
        places = block.places
        assert places is not None

        def row(place: int) -> Any:
            self.check()
            return self.row(int(places[place]), int(places[place + 1]))

        return row

    @abstractmethod
    def row(self, start: int, stop: int) -> Any:
        """Returns the row between two places."""


class JsonLines(_Placed):
    """A text file with a JSON object in each line; blank lines, white space too, are no rows."""

    def blocks(self) -> Iterator[RowBlock]:
        begin, starts, last, indented = 0, [np.zeros(1, np.uint64)], b"\n", list[int]()
        while content := self.opened.read(_READ, begin):
            codes = np.frombuffer(content, np.uint8)
            feeds = np.flatnonzero(codes == 10)
            starts.append((feeds + (begin + 1)).astype(np.uint64))
            inside = feeds[: len(feeds) - (content[-1] == 10)] + 1
            indented += [begin] * bool(last == b"\n" and codes[0] <= 32) + (
                inside[codes[inside] <= 32] + begin
            ).tolist()
            begin, last = begin + len(content), content[-1:]
        ends = np.concatenate([*starts, np.array([begin] * (last != b"\n"), np.uint64)])
        lengths = np.diff(ends)
        if lengths.max(initial=0) > MOST_ROW:
            raise self.unfit(f"a line of {int(lengths.max()):,} bytes, of at most {MOST_ROW:,}")
        full = lengths > 1
        for place in np.searchsorted(ends, np.array(indented, np.uint64)).tolist():
            full[place] = bool(self.opened.read(int(lengths[place]), int(ends[place])).strip())
        rows = ends[:-1][full]
        yield RowBlock(len(rows), 0, begin, np.append(rows, np.uint64(begin)))

    def row(self, start: int, stop: int) -> Any:
        line = self.opened.read(stop - start, start).partition(b"\n")[0]
        return _decoded(self, line, f"the line at byte {start:,}")


def _decoded(opened: Format, line: bytes, where: str) -> Any:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        row, text = None, line.lstrip()
        with contextlib.suppress(ValueError, RecursionError):  # Python's reads a byte order mark, NaN, half of a letter
            row = json.loads(line.decode("utf-8-sig"))
        in_lines = text.startswith(b"[") or text.rstrip() == b"{"  # one value over several lines
        if row is None and (isinstance(error, RecursionError) or not in_lines):
            raise opened.damaged(f"{where} is no JSON ({_sentence(error)})") from None
    if not isinstance(row, dict):
        raise DataError(
            f"{printable(opened.file)}: {where} is no JSON object, but a part of one, an array or a value. Write one "
            "object in each line (jq -c '.[]' FILE, or jq -c . FILE)"
        )
    return row


class Compressed(Format):
    """JSON lines by gzip or zstd: a block is a megabyte of lines, and blocks are quick to read in order alone."""

    sequential = True
    slack = 3 << 18

    def open(self) -> None:
        self._at = 0
        self._stream: Any = None

    def blocks(self) -> Iterator[RowBlock]:
        self._begin()
        rest, most = b"", MOST_RATIO * max(1 << 16, self.facts[0])
        while True:
            content = self._unpacked(BLOCK_BYTES)
            text = rest + content
            if self._at > most:
                raise self.damaged(f"it unpacks to more than {MOST_RATIO:,} times its size: a decompression bomb")
            end = text.rfind(b"\n") + 1 if content else len(text)
            if len(text) - end > MOST_ROW:
                raise self.unfit(f"a line of more than {MOST_ROW:,} bytes, unpacked")
            if end:
                yield RowBlock(len(_lines(text[:end])), self._at - len(text), end)
            if not content:
                return
            rest = text[end:]

    def read(self, block: RowBlock) -> Callable[[int], Any]:
        self.check()
        if self._stream is None or self._at > block.start:
            self._begin()
        while self._at < block.start:
            if not self._unpacked(min(BLOCK_BYTES, block.start - self._at)):
                raise self.changed()
        lines = _lines(self._unpacked(block.size))
        if len(lines) != block.rows:
            raise self.changed()
        self.expansion = sum(map(sys.getsizeof, lines)) / block.size
        where = f"of the block at unpacked byte {block.start:,}"
        return lambda place: _decoded(self, lines[place], f"line {place} {where}")

    def _begin(self) -> None:
        arrow = library("pyarrow", "compressed text")
        kind = "gzip" if self.file.name.endswith(".gz") else "zstd"  # of zstd, windows up to 128 MB, as `zstd -d` takes
        self._at, self._stream = 0, arrow.input_stream(str(self.file), compression=kind)
        self.held, header = _UNPACKING, self.opened.read(14, 0)
        if header.startswith(b"\x28\xb5\x2f\xfd") and len(header) == 14:
            # The output that a decompressor keeps, by a zstd frame's header (RFC 8878, 3.1.1).
            flags, window = header[4], header[5]
            size = (8 + window % 8) << (7 + (window >> 3))
            if flags & 32:  # the content is one piece
                size = int.from_bytes(header[5 : 5 + (1 << (flags >> 6))], "little") + 256 * (flags >> 6 == 1)
            self.held += min(size, 1 << 27) + (1 << 18)  # more is refused; two blocks of 128 KiB are between

    def _unpacked(self, size: int) -> bytes:
        """Returns that many bytes, fewer at the end."""
        try:
            content = self._stream.read(size)
        except OSError as error:
            raise self.damaged(f"it is cut off or damaged: {_sentence(error)}") from None
        self._at += len(content)
        return content


def _lines(text: bytes) -> list[bytes]:
    return [line for line in text.split(b"\n") if line and (line[0] > 32 or line.strip())]


class Tokens(_Placed):
    """A file of nothing but tokens of one type: a row is a document, or without `end` the whole file."""

    def open(self) -> None:
        kind, size = np.dtype(self.options.dtype), self.facts[0]
        if size % kind.itemsize:
            raise self.damaged(f"{size:,} bytes are no whole number of {kind.name}: cut off, or of another dtype")
        if self.opened.read(4, 0) in _LLM_C:
            raise DataError(f"{printable(self.file)} has llm.c's header: tail -c +{_LLM_C_HEADER + 1} takes it away")
        idx = self.file.with_suffix(".idx")
        if idx.is_file() and (start := OpenFile(idx).read(18, 0)).startswith(b"MMIDIDX"):
            its = _MEGATRON.get(start[-1], "another type")
            if its != kind.name:
                raise DataError(f"{printable(self.file)} has tokens of {its}, by its index {idx.name}: not {kind.name}")
        # slices of a plain array take half the time of a memmap's
        self._map = np.asarray(np.memmap(self.file, kind, mode="r") if size else np.empty(0, kind))

    def blocks(self) -> Iterator[RowBlock]:
        ends = [np.zeros(1, np.uint64)]
        for first in range(0, len(self._map) if self.options.end is not None else 0, _READ):
            places = np.flatnonzero(self._map[first : first + _READ] == self.options.end)
            ends.append((places + (first + 1)).astype(np.uint64))
        starts = np.concatenate(ends)
        if int(starts[-1]) != len(self._map):
            starts = np.append(starts, np.uint64(len(self._map)))
        yield RowBlock(len(starts) - 1, 0, 0, starts)

    def row(self, start: int, stop: int) -> Any:
        return self._map[start:stop]

    def tokens(self, block: RowBlock, column: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        assert block.places is not None
        return self._map, block.places


class Tar(_Placed):
    """A tar shard in WebDataset's form: a row is the neighbours of one key, by their endings."""

    def blocks(self) -> Iterator[RowBlock]:
        starts, end = list[int](), 0
        for _, parts in self._samples(0):
            starts.append(end)
            for member in parts.values():
                end = member.offset + -(-member.size // 512) * 512
        yield RowBlock(len(starts), 0, self.facts[0], np.array([*starts, end], np.uint64))

    def row(self, start: int, stop: int) -> Any:
        key, parts = next(self._samples(start))
        row: dict[str, Any] = {"__key__": key.decode(errors="replace")}
        for ending, member in parts.items():
            if member.size > MOST_ROW:
                raise self.unfit(f"a member of {member.size:,} bytes, of at most {MOST_ROW:,}")
            row[ending.decode(errors="replace")] = self.opened.read(member.size, member.offset)
        return row

    def _samples(self, start: int) -> Iterator[tuple[bytes, dict[bytes, Member]]]:
        archive = Extent(self.opened, printable(self.file.name), start, self.facts[0])
        return by_sample(archive, self._members(archive))

    def _members(self, archive: Extent) -> Iterator[Member]:
        try:
            yield from members(archive)
        except DataError as error:
            raise self.damaged(str(error)) from None


FORMATS: dict[str, type[Format]] = {
    ".parquet": Parquet,
    ".arrow": Arrow,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".jsonl.gz": Compressed,
    ".jsonl.zst": Compressed,
    ".json.gz": Compressed,
    ".tar": Tar,
    ".bin": Tokens,
}
"""By the end of a file's name."""


def _columns(schema: Any) -> dict[str, str]:
    """Returns the type of each column as a row has it: an int of whatever width, a text of whatever encoding."""
    types = library("pyarrow", "Arrow").types
    kinds = {
        "integer": types.is_integer,
        "float": types.is_floating,
        "text": lambda kind: types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind),
    }
    columns = {}
    for field in schema:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        columns[field.name] = next((name for name, is_kind in kinds.items() if is_kind(kind)), str(kind))
    return columns


def _sentence(error: BaseException) -> str:
    return printable(str(error).partition("\n")[0].rstrip(".")) or type(error).__name__
