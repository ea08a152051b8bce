"""Lists the images of a folder of class folders, SOURCE/CLASS/NAME.jpg, at any depth below the class."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from grappe.data.images.listing import (
    ENTRY,
    LARGEST,
    THREADS,
    Found,
    Listing,
    Said,
    in_order,
    is_image,
    labelled,
)
from grappe.errors import DataError
from grappe.errors.foreign_text import printable


def folder_listing(source: Path, said: Said) -> Listing:
    """Lists a folder: classes are its folders, in the order of their names.

    Raises:
        DataError: it has no folder, or something in it cannot be read.
    """
    with os.scandir(source) as found:
        classes = sorted(one.name for one in found if one.is_dir() and not one.name.startswith("."))
    if not classes:
        raise DataError(f"{source} has no class folders: images lie in SOURCE/CLASS/NAME.jpg")
    parts: list[Found] = []
    inside = [""]
    with ThreadPoolExecutor(THREADS) as threads:
        for part, folders in threads.map(lambda name: _class_folder(source, name), classes):
            parts.append(part)
            inside += folders
            said(f"{len(parts):,} of {len(classes):,} class folders")
    return labelled("folder", inside, classes, parts)


def _class_folder(source: Path, name: str) -> tuple[Found, list[str]]:
    """The images of a class, and the folders that they lie in."""
    names, rows, left_out, folders = [], [], 0, [name]
    for inside in folders:  # which grows meanwhile
        with os.scandir(source / inside) as found:
            for one in found:
                path = f"{inside}/{one.name}"
                if one.is_dir(follow_symlinks=False):
                    folders.append(path)
                    continue
                if not is_image(os.fsencode(one.name)):
                    left_out += 1
                    continue
                try:
                    facts = one.stat()
                except OSError as error:
                    raise DataError(f"{source / path} cannot be read: {error.strerror}") from None
                if facts.st_size > LARGEST or "\n" in path:
                    raise DataError(f"{printable(source / path)} is no image: its size or name is none")
                names.append(os.fsencode(path))
                rows.append((facts.st_mtime_ns, facts.st_size, 0, 0, 0))
    return in_order(names, np.array(rows, ENTRY), left_out), folders
