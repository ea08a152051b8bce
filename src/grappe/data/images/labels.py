"""Reads files of labels: which class each image of a flat archive (ImageNet's validation set) is of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grappe.errors import DataError
from grappe.errors.foreign_text import printable

MOST_BYTES = 1 << 28
_NUMBER = re.compile(r"[0-9]{1,9}")


def labels_of(
    file: Path, names: Sequence[bytes], numbering: Path | None
) -> tuple[NDArray[np.int32], list[str]]:
    """Returns the label of each of `names`, which are in order, int32 (n,), and the classes' names, in order.

    A line is a class of the image in that place (`n01751748`), or an image and its class (`NAME n01751748`, or with a
    comma, as Kaggle's LOC_val_solution.csv has it), or a number from 1, as ILSVRC2012_validation_ground_truth.txt has
    it. Such numbers are not in the order of the classes' names, so `numbering` must say what they mean.

    Raises:
        DataError: the file is of no such form, or an image has no line.
    """
    lines = [re.split(r"[\s,]+", line.strip()) for line in _lines(file)]
    if lines and lines[0][0] == "ImageId":
        del lines[0]
    if not lines:
        raise DataError(f"{file} has no line")
    if len(lines[0]) == 1:
        if len(lines) != len(names):
            raise DataError(f"{file} has {len(lines):,} lines for {len(names):,} images")
        words = [line[0] for line in lines]
    else:
        words = _by_name(file, lines, names)
    if all(map(_NUMBER.fullmatch, words)):
        words = _named(file, words, numbering)
    classes = sorted(set(words))
    places = {name: place for place, name in enumerate(classes)}
    return np.array([places[word] for word in words], np.int32), classes


def _by_name(file: Path, lines: list[list[str]], names: Sequence[bytes]) -> list[str]:
    """The class of each of `names`, from lines that name the image, with its ending or without."""
    known = {Path(line[0]).stem: line[1] for line in lines if len(line) > 1}
    stems = [Path(name.decode(errors="replace")).stem for name in names]
    absent = next((stem for stem in stems if stem not in known), None)
    if absent is not None:
        raise DataError(f"{file} has no line for the image '{printable(absent)}'")
    return [known[stem] for stem in stems]


def _named(file: Path, words: Sequence[str], numbering: Path | None) -> list[str]:
    if numbering is None:
        raise DataError(
            f"{file} has numbers, and not the names of classes; they are not in the order of the names. Say "
            "with numbering= (--numbering) which file has the class of each number (the devkit's map_clsloc.txt)"
        )
    meaning = _numbered(numbering)
    absent = next((word for word in words if int(word) not in meaning), None)
    if absent is not None:
        raise DataError(f"{numbering} does not say which class {absent} is, which {file} has")
    return [meaning[int(word)] for word in words]


def _numbered(file: Path) -> dict[int, str]:
    """The class of each number: a line for each, `n02119789 1 kit_fox`, or `1 n02119789`, or its name alone, from 1."""
    found: dict[int, str] = {}
    for place, line in enumerate(_lines(file), 1):
        words = line.split()
        numbers = [word for word in words[:2] if _NUMBER.fullmatch(word)]
        others = [word for word in words[:2] if not _NUMBER.fullmatch(word)]
        if not others or len(numbers) > 1:
            raise DataError(f"{file}, line {place}: a class's name and its number were expected")
        found[int(numbers[0]) if numbers else place] = others[0]
    return found


def _lines(file: Path) -> list[str]:
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    if len(content) > MOST_BYTES:
        raise DataError(f"{file} is too large for a file of labels")
    return [line for line in content.decode(errors="replace").splitlines() if line.strip()]
