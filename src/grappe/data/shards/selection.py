"""Selects the files of a source that are data: counts the others, and refuses several splits in one source."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from grappe.errors import DataError
from grappe.errors.foreign_text import printable

LeftOut = dict[str, tuple[int, str]]
"""Files that are no data, by kind (".txt", "hidden"): their number, and the name of one of them."""
_MOST_KINDS = 16
_SPLIT = re.compile(r"(train|training|val|valid|validation|dev|eval|test|testing)(?=$|\.|[-_][0-9])", re.IGNORECASE)
_NUMBERED = re.compile(r"(.*)[0-9]{5}-of-([0-9]{5})(.*)", re.DOTALL)


def leave_out(left_out: LeftOut, name: str, kind: str | None = None, count: int = 1) -> None:
    """Counts a file that is left out, by the ending of its name, or by `kind`."""
    if kind is None:
        hidden = "/." in "/" + name.removeprefix("./")
        kind = "hidden" if hidden else Path(name).suffix.lower() or "without an ending"
    kind = printable(kind)
    kind = kind if kind in left_out or len(left_out) < _MOST_KINDS else "others"
    before, example = left_out.get(kind, (0, printable(name)))
    left_out[kind] = before + count, example


def joined(parts: Iterable[LeftOut]) -> LeftOut:
    """Adds up what several parts of a source leave out."""
    total: LeftOut = {}
    for part in parts:
        for kind, (count, example) in part.items():
            leave_out(total, example, kind, count)
    return total


def counts(left_out: LeftOut) -> str:
    """Writes what is left out, with an example of each kind: ".txt 3 (ant/a.txt), hidden 1 (._a.jpg)"."""
    return ", ".join(f"{kind} {count:,} ({example})" for kind, (count, example) in sorted(left_out.items()))


def split_of(name: str) -> str:
    """Returns the split that a file or folder is named after: "train-00000.parquet" has "train"; "" if none."""
    match = _SPLIT.match(name)
    return match[0].lower() if match else ""


def refuse_splits(source: Path, splits: Iterable[str]) -> None:
    """Refuses a source whose files or folders are named after several splits.

    Raises:
        DataError: they are, and a training on it would read its test set.
    """
    several = sorted({*splits} - {""})
    if len(several) > 1:
        raise DataError(
            f"{printable(source)} has several splits ({', '.join(several)}): name the folder or the files of one, such "
            f"as {printable(source / several[0])} or '{several[0]}*'"
        )


def refuse_gaps(source: Path, names: Iterable[str]) -> None:
    """Refuses files that are numbered as parts, as a-00000-of-00002.parquet, where a part is missing.

    Raises:
        DataError: it is.
    """
    there = set(names)
    for begin, count, end in sorted({match.groups() for match in map(_NUMBERED.fullmatch, there) if match}):
        first = f"{begin}{count}-of-{count}{end}" in there  # some count from 1
        for number in range(first, min(int(count), len(there) + 1) + first):
            if (name := f"{begin}{number:05d}-of-{count}{end}") not in there:
                raise DataError(
                    f"{printable(source)} lacks {printable(name)}: fetch it, or give a glob of the files to read"
                )
