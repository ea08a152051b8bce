"""Makes a source's index, or says which there is."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from grappe.data.images.index import open_index, quarantined
from grappe.verbs.data.meter import Ticker


@dataclasses.dataclass(frozen=True, kw_only=True)
class Indexed:
    """Result of indexing."""

    kind: str
    images: int
    classes: int
    left_out: int
    """Files that are no images by their names."""
    quarantined: int
    file: Path
    size: int
    """Of the index in bytes."""
    seconds: float


def index(
    source: Path, *, labels: Path | None = None, numbering: Path | None = None, again: bool = False
) -> Indexed:
    """Reads the headers of a source once; a second call finds the index that the first has written.

    Raises:
        DataError: the source is missing, damaged, or of another form.
    """
    began = time.monotonic()
    source = source.absolute()
    index, file = open_index(source, labels, numbering, again=again, report=Ticker())
    return Indexed(
        kind=index.kind,
        images=len(index),
        classes=len(index.classes),
        left_out=index.left_out,
        quarantined=len(quarantined(source, index)),
        file=file,
        size=file.stat().st_size,
        seconds=time.monotonic() - began,
    )
