"""Tells what a source of images is, and lists it: a folder of class folders, an archive, or a folder of shards."""

from __future__ import annotations

from pathlib import Path

from grappe.data.images.archives import archive_listing
from grappe.data.images.folders import folder_listing
from grappe.data.images.listing import Kind, Listing, Said
from grappe.data.images.shards import sharded_listing, shards_in
from grappe.errors import DataError


def kind_of(source: Path) -> Kind:
    """Tells what a source is.

    Raises:
        DataError: it is nothing that has images.
    """
    if source.is_file():
        return "archive"
    if not source.is_dir():
        raise DataError(
            f"{source}: there is no such file or folder. Name a folder of class folders, a .tar archive, or a folder "
            "of .tar shards"
        )
    return "shards" if shards_in(source) else "folder"


def listing(source: Path, labels: Path | None, numbering: Path | None, said: Said) -> Listing:
    """Lists all images of a source.

    Raises:
        DataError: it is damaged, of another form, or has none.
    """
    kind = kind_of(source)
    if labels is not None and kind != "archive":
        raise DataError(f"{source} has labels of its own: labels= is for an archive without classes")
    if kind == "archive":
        found = archive_listing(source, labels, numbering, said)
    else:
        found = (folder_listing if kind == "folder" else sharded_listing)(source, said)
    if not len(found.entries):
        raise DataError(f"{source} has no image (.jpg, .jpeg or .png) in it")
    return found
