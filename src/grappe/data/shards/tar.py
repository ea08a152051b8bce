"""Walks the headers of a tar archive by pread, and unpacks nothing.

Formats: POSIX.1-2017, "pax Interchange Format" and "ustar"; GNU tar's manual, "Basic Tar Format" (long names).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import xxhash

from grappe.data.shards.open_file import OpenFile
from grappe.errors import DataError, refuse_pointer
from grappe.errors.foreign_text import printable

BLOCK = 512
_WINDOW = 1 << 13  # bytes that are read at once: the headers of several small members, and of a large one a page
_ZEROS = 1 << 20  # bytes behind an archive's end that are looked at together
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
    """First byte of its content, from the beginning of the outer file."""
    size: int
    mark: int
    """`mark_of` its header block, which stands right before its content."""
    head: bytes
    """The first bytes of its content: no more than a block."""


class Extent(NamedTuple):
    """An archive: a whole file, or the part of one that is a member of another archive."""

    file: OpenFile
    title: str
    """For messages: `train.tar`, or `n01440764.tar in train.tar`."""
    start: int
    stop: int


def archive_in(file: Path) -> Extent:
    """Opens a file that is an archive.

    Raises:
        DataError: it cannot be read.
    """
    opened = OpenFile(file)
    refuse_pointer(opened.name, opened.read(BLOCK, 0))
    return Extent(opened, opened.name, 0, opened.facts[0])


def by_sample(archive: Extent, members: Iterable[Member]) -> Iterator[tuple[bytes, dict[bytes, Member]]]:
    """Groups neighbours of one sample: their names are alike up to the first dot behind their folder, its key.

    Yields:
        The key, and the sample's members by the rest of their names behind the dot.

    Raises:
        DataError: a sample has two members of one ending, or its members are no neighbours.
    """
    keys = set[int]()  # hashes: an archive may have millions
    for key, group in itertools.groupby(members, lambda member: _key_of(member.name)):
        parts: dict[bytes, Member] = {}
        for member in group:
            if parts.setdefault(member.name[len(key) + 1 :], member) is not member:
                _refuse_sample(archive, member.name, "is there twice")
        if (hashed := xxhash.xxh3_64_intdigest(key)) in keys:
            _refuse_sample(archive, next(iter(parts.values())).name, "is no neighbour of its sample's other members")
        keys.add(hashed)
        yield key, parts


def _refuse_sample(archive: Extent, name: bytes, what: str) -> NoReturn:
    raise DataError(
        f"{archive.title}: '{printable(name.decode(errors='replace'))}' {what}: pack the shard again, each sample's "
        "members one after the other (tar --sort=name)"
    )


def _key_of(name: bytes) -> bytes:
    dot = name.find(b".", name.rfind(b"/") + 1)
    return name if dot < 0 else name[:dot]


def mark_of(header: bytes | memoryview) -> int:
    """Hashes a header block to 32 bits, to notice another file in the archive's place."""
    return xxhash.xxh32_intdigest(header)


def members(archive: Extent) -> Iterator[Member]:
    """Yields the regular files of an archive, in its order; folders are left out.

    Raises:
        DataError: the archive is cut off or damaged; or a member is a link, a device, sparse, or named to lie outside.
    """
    position, count, extension = archive.start, 0, _NONE
    window, start = b"", position
    while True:
        begin = position - start
        if begin + 2 * BLOCK > len(window):
            window = archive.file.read(max(0, min(_WINDOW, archive.stop - position)), position)
            start, begin = position, 0
        header = window[begin : begin + BLOCK]
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
                    head = window[begin + BLOCK : begin + BLOCK + min(size, BLOCK)]
                    yield Member(name, position, size, mark_of(header), head)
                    count += 1
            extension = _NONE
        position += -(-size // BLOCK) * BLOCK


class _Extension(NamedTuple):
    """Name and size of the next member, from the headers before its own."""

    name: bytes = b""
    size: int | None = None
    sparse: bool = False


_NONE = _Extension()


def _extended(before: _Extension, kind: bytes, archive: Extent, position: int, size: int) -> _Extension:
    if size > MOST_EXTENSION:
        _refuse(archive, f"an extended header of {size:,} bytes")
    content = archive.file.read(size, position)
    if len(content) < size or position + size > archive.stop:
        _cut(archive, None)
    if kind == b"L":
        return before._replace(name=content.rstrip(b"\0"))
    if kind == b"K":  # the long target of a link, which is refused with the link
        return before
    records, at = dict[bytes, bytes](), 0
    while at < len(content) and content[at]:  # `LENGTH KEY=VALUE` and a line feed; the length counts all of the record
        space = content.find(b" ", at, at + 20)
        digits = content[at:space] if space > 0 else b""
        length = int(digits) if digits.isdigit() else 0
        record = content[space + 1 : at + length]
        key, equals, value = record.removesuffix(b"\n").partition(b"=")
        if not equals or not record.endswith(b"\n") or at + length > len(content):
            _refuse(archive, "a damaged pax header")
        records[key], at = value, at + length
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
    if (
        not name
        or name.startswith(b"/")
        or b"\0" in name
        or b"\n" in name
        or (b".." in name and b".." in name.split(b"/"))
    ):
        shown = printable(name.decode(errors="replace"))
        _refuse(archive, f"the name '{shown}', which is not a path inside a folder")


def _check_rest(archive: Extent, position: int) -> None:
    """Checks that an archive has nothing but zeros behind its end; else a hole in it would be taken for the end."""
    while position < archive.stop and (rest := archive.file.read(min(_ZEROS, archive.stop - position), position)):
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
