"""Lists the images of one tar archive: of a tar for each class (ImageNet as downloaded), of class folders, or flat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grappe.data.images.labels import labels_of
from grappe.data.images.listing import (
    THREADS,
    Found,
    Listing,
    Said,
    in_order,
    is_image,
    joined,
    labelled,
    opened,
    rows_of,
    text_of,
)
from grappe.data.images.tar import Extent, Member, members
from grappe.errors import DataError
from grappe.errors.foreign_text import printable


def archive_listing(source: Path, labels: Path | None, numbering: Path | None, said: Said) -> Listing:
    """Lists an archive; `labels` is a file for one whose images are in no class, `numbering` what numbers in it mean.

    Raises:
        DataError: it is damaged, or does not say the class of each image.
    """
    with opened(source) as archive:
        outer = list(_counted(members(archive), said))
        inner = [one for one in outer if one.name.endswith(b".tar")]
        if labels is None and inner:
            return _archives(archive, sorted(inner), said)
    images = [one for one in outer if is_image(one.name)]
    left_out = len(outer) - len(images)
    if labels is not None:
        part = in_order([one.name for one in images], rows_of(images), left_out)
        part.entries["label"], classes = labels_of(labels, part.names, numbering)
        return joined("archive", ("",), classes, [part])
    if any(one.name.endswith(b".cls") for one in outer):
        raise DataError(f"{source} is a shard: put it into a folder of shards, and name the folder")
    by_class: dict[bytes, list[Member]] = {}
    for one in images:
        folder = one.name.removeprefix(b"./").rpartition(b"/")[0].rpartition(b"/")[2]
        if not folder:
            raise DataError(
                f"{source} has images without a class ('{printable(text_of(one.name))}'): say "
                "with labels= (--labels) which file has their classes"
            )
        by_class.setdefault(folder, []).append(one)
    classes = sorted(by_class)
    parts = [in_order([one.name for one in by_class[name]], rows_of(by_class[name]), 0) for name in classes]
    return labelled("archive", ("",), list(map(text_of, classes)), parts, left_out)


def _archives(archive: Extent, inner: Sequence[Member], said: Said) -> Listing:
    """The images of archives in an archive, whose names are those of the classes."""

    def walked(one: Member) -> Found:
        name = one.name.rpartition(b"/")[2].removesuffix(b".tar")
        title = f"{printable(text_of(one.name))} in {archive.title}"
        found = list(members(Extent(archive.handle, title, one.offset, one.offset + one.size)))
        images = [member for member in found if is_image(member.name)]
        names = [name + b"/" + member.name.removeprefix(b"./") for member in images]
        return in_order(names, rows_of(images), len(found) - len(images))

    parts: list[Found] = []
    with ThreadPoolExecutor(THREADS) as threads:
        for part in threads.map(walked, inner):
            parts.append(part)
            said(f"{len(parts):,} of {len(inner):,} classes")
    classes = [text_of(one.name.rpartition(b"/")[2].removesuffix(b".tar")) for one in inner]
    return labelled("archive", ("",), classes, parts)


def _counted(found: Iterator[Member], said: Said) -> Iterator[Member]:
    for count, one in enumerate(found, 1):
        if count % 1000 == 0:
            said(f"{count:,} members")
        yield one
