"""Decodes every image of a source, and lists those that cannot be, which datasets then leave out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from grappe.data.images.dataset import Reader
from grappe.data.images.decode import NoPicture, decoded, header_of, simplejpeg
from grappe.data.images.index import Index, open_index, write_quarantine
from grappe.errors import DataError
from grappe.verbs.data.meter import Meter, Ticker
from grappe.verbs.data.threads import in_threads

_MOST_BAD = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Result of a check."""

    images: int
    bad: tuple[tuple[str, str], ...]
    """Name and reason of each that cannot be decoded."""
    quarantine: Path | None
    """The list that was written; None: all can be decoded."""
    sees_all: bool
    """Whether the decoder sees damage that leaves a picture, as simplejpeg does."""


def check(source: Path, *, labels: Path | None = None, numbering: Path | None = None) -> Checked:
    """Decodes every image of a source whole, and writes the list of those that cannot be beside it.

    Raises:
        DataError: the source is missing or damaged as a whole, a file changes meanwhile, or more than half of the
            images cannot be decoded: then something else is wrong.
    """
    source = source.absolute()
    index = open_index(source, labels, numbering, report=Ticker())[0]
    bad = _bad(source, index)
    if len(bad) > _MOST_BAD * len(index):
        place = next(iter(bad))
        raise DataError(
            f"{source}: {len(bad):,} of {len(index):,} images cannot be decoded, {Reader(source, index).name(place)} "
            f"for one ({bad[place]}): no list is written, since this is no collection of JPEG and PNG files"
        )
    reader = Reader(source, index)
    return Checked(
        images=len(index),
        bad=tuple((reader.name(place), reason) for place, reason in sorted(bad.items())),
        quarantine=write_quarantine(source, index, bad),
        sees_all=simplejpeg() is not None,
    )


def _bad(source: Path, index: Index) -> dict[int, str]:
    """The reason why an image cannot be decoded, by its place."""
    reader = Reader(source, index)

    def reason(place: int) -> str:
        data = reader.read(place)
        try:
            decoded(data, header_of(data))
        except NoPicture as error:
            return str(error)
        return ""

    bad: dict[int, str] = {}
    meter = Meter("checking", len(index))
    for place, why in enumerate(in_threads(reason, range(len(index)))):
        if why:
            bad[place] = why
        meter.at(place + 1, f"{len(bad):,} bad" if bad else "")
    meter.end()
    return bad
