"""Walks the headers of a tar archive by pread, and unpacks nothing.

Formats: POSIX.1-2017, "pax Interchange Format" and "ustar"; GNU tar's manual, "Basic Tar Format" (long names).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import numpy as np
import xxhash

from grappe.errors import DataError
from grappe.errors.foreign_text import printable

BLOCK = 512
_WINDOW = 1 << 20
_SMALL = 1 << 13  # bytes of a member with its header: smaller ones are read by windows, whose headers numpy looks at
_SINGLY = 64  # members that are looked at one by one before a window is tried: a row of a corpus has fewer
_EVEN = np.uint64(0x00FF00FF00FF00FF)
MOST_EXTENSION = 1 << 20  # bytes of a long name or of pax records: real ones have less than a thousand
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a pipe",
    b"S": "a sparse file",
}


class Member(NamedTuple):
    """A regular file in an archive."""

    name: bytes
    offset: int
    """Of its content, from the beginning of the outer file."""
    size: int
    mark: int
    """`mark_of` its header block, which stands right before its content."""
    head: bytes
    """The first bytes of its content: no more than a block."""


class Extent(NamedTuple):
    """An archive: a whole file, or the part of one that is a member of another archive."""

    handle: int
    title: str
    """For messages: `train.tar`, or `n01440764.tar in train.tar`."""
    start: int
    stop: int


def key_of(name: bytes) -> bytes:
    """Returns the key of a member's sample: its name up to the first dot behind its folder."""
    dot = name.find(b".", name.rfind(b"/") + 1)
    return name if dot < 0 else name[:dot]


def mark_of(header: bytes | memoryview) -> int:
    """Hashes a header block to 32 bits, to notice another file in the archive's place."""
    return xxhash.xxh32_intdigest(header)


class MemberRun(NamedTuple):
    """Regular files that follow one another in an archive."""

    names: list[bytes]
    offsets: list[int]
    """Of their contents, from the beginning of the outer file."""
    sizes: list[int]
    window: bytes
    """Of the outer file, with all of their headers and the first blocks of their contents."""
    start: int
    """First byte of the window in the outer file."""


def members(archive: Extent) -> Iterator[Member]:
    """Yields the regular files of an archive, in its order; folders are left out.

    Raises:
        DataError: the archive is cut off or damaged; or a member is a link, a device, sparse, or named to lie outside.
    """
    for names, offsets, sizes, window, start in runs(archive):
        for name, offset, size in zip(names, offsets, sizes, strict=True):
            begin = offset - start
            head = window[begin : begin + (size if size < BLOCK else BLOCK)]
            yield Member(name, offset, size, mark_of(window[begin - BLOCK : begin]), head)


def runs(archive: Extent) -> Iterator[MemberRun]:
    """Yields the regular files of an archive by runs, of which each has at least one file; see `members`."""
    position, count, singly = archive.start, 0, _SINGLY
    extension = _NONE
    while True:
        if not singly and extension is _NONE:
            window = os.pread(archive.handle, max(0, min(_WINDOW, archive.stop - position)), position)
            run = _plain_run(window, position)
            # Where members are large, most of a window would be read in vain.
            singly = 1 if len(run.names) >= _WINDOW // _SMALL else _SINGLY
            if run.names:
                yield run
                count += len(run.names)
                position = run.offsets[-1] + -(-run.sizes[-1] // BLOCK) * BLOCK
        singly = max(0, singly - 1)
        block = os.pread(archive.handle, max(0, min(2 * BLOCK, archive.stop - position)), position)
        header = block[:BLOCK]
        if len(header) < BLOCK:
            _cut(archive, count)
        if not any(header):
            _check_rest(archive, position)
            return
        kind, size = header[156:157], _checked_size(header, archive, position)
        position += BLOCK
        if kind in (b"L", b"K", b"x", b"g"):
            extension = _extended(extension, kind, archive, position, size)
        else:
            size = extension.size if extension.size is not None else size
            name = extension.name or _name(header)
            if kind in _REFUSED or extension.sparse:
                what = _REFUSED.get(kind, "a sparse file")
                _refuse(archive, f"'{printable(name.decode(errors='replace'))}' is {what}")
            if kind != b"5":
                if kind not in (b"0", b"\0", b"7"):  # 7: a contiguous file, taken for a regular one
                    _refuse(archive, f"a member of the unknown type '{printable(kind.decode('latin-1'))}'")
                if not name.endswith(b"/"):
                    _check_name(name, archive)
                    if position + size > archive.stop:
                        _cut(archive, count)
                    yield MemberRun([name], [position], [size], block, position - BLOCK)
                    count += 1
            extension = _NONE
        position += -(-size // BLOCK) * BLOCK


def _plain_run(window: bytes, position: int) -> MemberRun:
    """Lists the regular files at the beginning of a part of an archive, up to one that needs a closer look.

    Such are headers that are not of ustar's or GNU's usual form, names that are long or could be refused, and the
    last of the part, as what follows it is not seen.

    Args:
        position: of the window in the file.
    """
    records = np.frombuffer(window, np.uint8, len(window) // BLOCK * BLOCK).reshape(-1, BLOCK)
    places = np.flatnonzero(records[:-1, 257:262].copy().view("S5").ravel() == b"ustar")
    heads = records[places]
    words = heads.view(np.uint64)
    # Four sums of two bytes in each word, which stay below 2**16 over 64 words.
    pairs = (words & _EVEN) + ((words >> np.uint64(8)) & _EVEN)
    totals = pairs.sum(1).view(np.uint16).reshape(-1, 4).sum(1, dtype=np.int64)
    digits = heads[:, [*range(124, 135), *range(148, 154)]] - np.uint8(ord("0"))
    sizes, sums = digits[:, :11] @ (8 ** np.arange(10, -1, -1)), digits[:, 11:] @ (8 ** np.arange(5, -1, -1))
    kinds, blocks = heads[:, 156], -(-sizes // BLOCK)
    plain = (
        (digits.max(1, initial=0) < 8)
        & ((heads[:, [135, 154, 155]] & 0xDF).max(1, initial=0) == 0)  # spaces or zeros
        & (totals - heads[:, 148:156].sum(1, dtype=np.int64) + 8 * 32 == sums)
        & ((kinds == ord("0")) | (kinds == 0))
        & ((heads[:, 345] == 0) | (heads[:, 262] == ord(" ")))  # ustar's prefix; GNU has other things there
        & (places + 1 + blocks <= len(records))
    )
    steps = np.zeros(len(records) + 1, np.int64)
    steps[places[plain]] = 1 + blocks[plain]
    ahead, chain, at = steps.tolist(), list[int](), 0
    while step := ahead[at]:
        chain.append(at)
        at += step
    numbers = np.searchsorted(places, chain)
    names = heads[numbers, :100].copy().view("S100").ravel().tolist()
    joined = b"\n".join([b"", *names, b""])
    if joined.count(b"\n") != len(names) + 1 or any(part in joined for part in (b"..", b"\0", b"\n/", b"/\n", b"\n\n")):
        names, chain, numbers = [], [], numbers[:0]
    offsets = [position + (place + 1) * BLOCK for place in chain]
    return MemberRun(names, offsets, sizes[numbers].tolist(), window, position)


class _Extension(NamedTuple):
    """Name and size of the next member, from the headers before its own."""

    name: bytes = b""
    size: int | None = None
    sparse: bool = False


_NONE = _Extension()


def _extended(before: _Extension, kind: bytes, archive: Extent, position: int, size: int) -> _Extension:
    if size > MOST_EXTENSION:
        _refuse(archive, f"an extended header of {size:,} bytes")
    content = os.pread(archive.handle, size, position)
    if len(content) < size or position + size > archive.stop:
        _cut(archive, None)
    if kind == b"L":
        return before._replace(name=content.rstrip(b"\0"))
    if kind == b"K":  # the long target of a link, which is refused with the link
        return before
    records = dict(_pax_records(content, archive))
    if kind == b"g":
        if records.keys() & {b"path", b"size"}:
            _refuse(archive, "one name or size for all members (a global pax header)")
        return before
    try:
        size_now = int(records[b"size"]) if b"size" in records else before.size
    except ValueError:
        _refuse(archive, "a pax header whose size is not a number")
    if size_now is not None and size_now < 0:
        _refuse(archive, "a pax header with a negative size")
    sparse = before.sparse or any(key.startswith(b"GNU.sparse.") for key in records)
    return _Extension(records.get(b"path", before.name), size_now, sparse)


def _pax_records(content: bytes, archive: Extent) -> Iterator[tuple[bytes, bytes]]:
    """The records `LENGTH KEY=VALUE` and a line feed; the length counts all of the record."""
    at = 0
    while at < len(content) and content[at]:
        space = content.find(b" ", at, at + 20)
        digits = content[at:space] if space > 0 else b""
        length = int(digits) if digits.isdigit() else 0
        record = content[space + 1 : at + length]
        key, equals, value = record.removesuffix(b"\n").partition(b"=")
        if not equals or not record.endswith(b"\n") or at + length > len(content):
            _refuse(archive, "a damaged pax header")
        yield key, value
        at += length


def _checked_size(header: bytes, archive: Extent, position: int) -> int:
    """The size that a header says, once its checksum is right."""
    total = sum(header.translate(None, b"\0")) - sum(header[148:156]) + 8 * 32  # most bytes are 0
    checksum = _number(header[148:156])
    size = _number(header[124:136])
    if checksum != total or size is None:
        inside = position - archive.start
        if inside == 0:
            _refuse(archive, "no tar header at its beginning: it is another kind of file, or compressed")
        _refuse(archive, f"a damaged header at byte {inside:,}")
    return size


def _number(field: bytes) -> int | None:
    """Octal digits, or, of sizes from 8 GiB, GNU's big-endian number after a set bit; None: neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    try:
        return int(digits, 8) if digits and digits[:1] not in b"+-" else None
    except ValueError:
        return None


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0":  # GNU's own magic has other things in the prefix's place
        prefix = header[345:500].partition(b"\0")[0]
        return prefix + b"/" + name if prefix else name
    return name


def _check_name(name: bytes, archive: Extent) -> None:
    if not name or name.startswith(b"/") or b"\0" in name or b"\n" in name or b".." in name.split(b"/"):
        shown = printable(name.decode(errors="replace"))
        _refuse(archive, f"the name '{shown}', which is not a path inside a folder")


def _check_rest(archive: Extent, position: int) -> None:
    """Checks that an archive has nothing but zeros behind its end; else a hole in it would be taken for the end."""
    while position < archive.stop and (
        rest := os.pread(archive.handle, min(_WINDOW, archive.stop - position), position)
    ):
        if rest.count(0) < len(rest):
            _refuse(
                archive,
                f"something behind its end at byte {position - archive.start:,}, as two archives or a hole have",
            )
        position += len(rest)


def _cut(archive: Extent, count: int | None) -> NoReturn:
    after = "" if count is None else f" after {count:,} complete members"
    raise DataError(f"{archive.title} is cut off{after}: fetch it again, and compare its size and checksum")


def _refuse(archive: Extent, what: str) -> NoReturn:
    raise DataError(
        f"{archive.title} has {what}: grappe reads regular files in a plain tar archive only. "
        "Pack it again (tar --format=ustar, without links), or unpack it and name the folder"
    )
