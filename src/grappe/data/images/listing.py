"""Lists a source's images in the order of their ids: a folder of class folders, an archive, or a folder of shards."""

from __future__ import annotations

import collections
import contextlib
import csv
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from grappe.data.shards.selection import LeftOut, counts, joined, leave_out, refuse_splits, split_of
from grappe.data.shards.tar import Extent, Member, archive_in, by_sample, members
from grappe.errors import DataError, DataNotFound, reading
from grappe.errors.foreign_text import printable

T = TypeVar("T")
Kind = Literal["folder", "archive", "shards"]
Report = Callable[[str], None]
"""Shows progress, in a few words."""
ENDINGS = (b".jpg", b".jpeg", b".jfif", b".png", b".webp", b".bmp", b".gif", b".tif", b".tiff", b".ppm", b".pgm")
"""Endings of files that are taken for pictures; their content decides on the kind."""
THREADS = 8  # they wait for a file system
LARGEST = (1 << 32) - 1
ENTRY = np.dtype([("offset", "<u8"), ("size", "<u4"), ("mark", "<u4"), ("file", "<u4"), ("label", "<i4")])
"""An image: where it begins in which archive, and its header's mark; of a file of its own `offset` is the mtime."""
CLASSES = "classes.txt"
"""In a folder of shards: the name of each class, a line for each label from 0."""
MANIFEST = "shards.json"
"""In a folder of shards that `grappe data pack` wrote: the shards that there are, with their sizes."""
BEGUN = ".pack.json"
"""In a folder that `grappe data pack` has begun: what is packed into it, and how."""
MOST_LABEL_BYTES = 1 << 28
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """The images of a source, N of them, in the order of their ids."""

    kind: Kind
    classes: tuple[str, ...]
    files: tuple[str, ...]
    """Archives below the source, or its class folders; "" is the source itself."""
    entries: NDArray[np.void]
    """[N] of `ENTRY`."""
    name_ends: NDArray[np.uint64]
    """[N]: where each name ends in `name_bytes`."""
    name_bytes: NDArray[np.uint8]
    left_out: LeftOut
    """Files that are no images."""

    def __len__(self) -> int:
        return len(self.entries)

    def names(self) -> Iterator[bytes]:
        """Yields the names of all images."""
        names, start = self.name_bytes.tobytes(), 0
        for end in self.name_ends.tolist():
            yield names[start:end]
            start = end

    def name(self, place: int) -> bytes:
        """The name of an image below the source: CLASS/NAME.jpg, or SHARD.tar/KEY.jpg."""
        start = int(self.name_ends[place - 1]) if place else 0
        return self.name_bytes[start : int(self.name_ends[place])].tobytes()


Row = tuple[bytes, int, int, int, int, int]
"""An image: its name, and the fields of ENTRY."""


class _Part(NamedTuple):
    """The images of one class folder, or of one archive."""

    names: list[bytes]
    entries: NDArray[np.void]
    left_out: LeftOut
    folders: Sequence[str] = ()
    """The folders that they lie in."""


def listing(source: Path, labels: Path | None, numbering: Path | None, report: Report) -> Index:
    """Lists all images of a source.

    Args:
        labels: the file of the labels of an archive whose images are in no class.
        numbering: the file that says what numbers in `labels` mean.

    Raises:
        DataError: it is damaged, of another form, or has none.
    """
    if source.is_file():
        images = _list_archive(source, labels, numbering, report)
    elif not source.is_dir():
        raise DataNotFound(
            f"{source}: there is no such file or folder. Name a folder of class folders, a .tar archive, or a folder "
            "of .tar shards"
        )
    elif labels is not None:
        raise DataError(f"{source} has its own labels: labels= is for an archive without classes")
    else:
        images = (_list_shards if shards_in(source) else _list_folder)(source, report)
    if not len(images):
        endings = b", ".join(ENDINGS).decode()
        raise DataError(f"{source} has no image ({endings}) in it; left out: {counts(images.left_out) or 'nothing'}")
    if labels is None and all(split_of(name) == name.lower() for name in images.classes):
        refuse_splits(source, images.classes)
    return images


def _part(rows: Sequence[Row], left_out: LeftOut, folders: Sequence[str] = ()) -> _Part:
    too_large = next((row for row in rows if row[2] > LARGEST), None)
    if too_large is not None:
        raise DataError(f"'{printable(_text(too_large[0]))}' is not an image: {too_large[2]:,} bytes")
    return _Part([row[0] for row in rows], np.array([row[1:] for row in rows], ENTRY), left_out, folders)


def _row(member: Member, name: bytes, label: int = 0, *, file: int = 0) -> Row:
    return (name, member.offset, member.size, member.mark, file, label)


def _in_threads(work: Callable[[T, int], _Part], items: Sequence[T], unit: str, report: Report) -> list[_Part]:
    """Calls `work` with each item and its place, by threads."""
    parts: list[_Part] = []
    with ThreadPoolExecutor(THREADS) as threads:
        for part in threads.map(work, items, range(len(items))):
            parts.append(part)
            report(f"{len(parts):,} of {len(items):,} {unit}")
    return parts


def _joined(
    kind: Kind, files: Sequence[str], classes: Sequence[str], parts: Sequence[_Part], left_out: LeftOut | None = None
) -> Index:
    """Puts the images of several folders or archives together, in this order."""
    names = [name for part in parts for name in part.names]
    for text in (*classes, *files):  # an index has its words in UTF-8
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"the folder {printable(text)} has a name that is not UTF-8, as unpacked by another system: rename it "
                "(convmv -f latin1 -t utf8 -r --notest FOLDER, or mv)"
            ) from None
    return Index(
        kind=kind,
        files=tuple(files),
        classes=tuple(classes),
        entries=np.concatenate([np.empty(0, ENTRY), *(part.entries for part in parts)]),
        name_ends=np.cumsum(np.fromiter(map(len, names), np.uint64, len(names)), dtype=np.uint64),
        name_bytes=np.frombuffer(b"".join(names), np.uint8),
        left_out=joined([left_out or {}, *(part.left_out for part in parts)]),
    )


def is_image(name: bytes) -> bool:
    """Returns whether a file is named as a picture is, and is not hidden, as ._NAME.jpg, which macOS adds."""
    return name.lower().endswith(ENDINGS) and b"/." not in b"/" + name.removeprefix(b"./")


def _text(name: bytes) -> str:
    """Decodes a name; bytes that are no UTF-8 are shown as �."""
    return name.decode(errors="replace")


# A folder of class folders, SOURCE/CLASS/NAME.jpg, at any depth below the class.


def _list_folder(source: Path, report: Report) -> Index:
    classes, left_out = list[str](), LeftOut()
    with os.scandir(source) as places:
        for place in places:
            if place.is_dir() and not place.name.startswith("."):
                classes.append(place.name)
            else:
                leave_out(left_out, place.name)
    if not classes:
        raise DataError(f"{source} has no class folders: images lie in SOURCE/CLASS/NAME.jpg")
    classes.sort()
    parts = _in_threads(lambda name, label: _class_folder(source, name, label), classes, "class folders", report)
    folders = ["", *(folder for part in parts for folder in part.folders)]
    for name in (name for name, part in zip(classes, parts, strict=True) if not part.names):
        leave_out(left_out, name, "folders without a picture")
    classes = [name for name, part in zip(classes, parts, strict=True) if part.names]
    for label, part in enumerate(part for part in parts if part.names):
        part.entries["label"] = label
    return _joined("folder", folders, classes, parts, left_out)


def _class_folder(source: Path, name: str, label: int) -> _Part:
    rows, left_out, folders = [], LeftOut(), [name]
    for inside in folders:  # which grows meanwhile
        with os.scandir(source / inside) as places:
            for place in places:
                path = f"{inside}/{place.name}"
                if place.is_dir(follow_symlinks=False) and not place.name.startswith("."):
                    folders.append(path)
                    continue
                if place.is_dir() or not is_image(os.fsencode(path)):
                    leave_out(left_out, path, "linked folders" if place.is_symlink() and place.is_dir() else None)
                    continue
                try:
                    facts = place.stat()
                except OSError as error:
                    raise DataError(f"{source / path} cannot be read: {error.strerror}") from None
                if "\n" in path:
                    raise DataError(f"{printable(source / path)} is not an image: its name has two lines")
                rows.append((os.fsencode(path), facts.st_mtime_ns, facts.st_size, 0, 0, label))
    return _part(sorted(rows), left_out, folders)


# One archive: a tar of a tar for each class (ImageNet as downloaded), of class folders, or flat.


def _list_archive(source: Path, labels: Path | None, numbering: Path | None, report: Report) -> Index:
    outer: list[Member] = []
    archive = archive_in(source)
    for member in members(archive):
        outer.append(member)
        if len(outer) % 1000 == 0:
            report(f"{len(outer):,} members")
    inner = sorted(member for member in outer if member.name.endswith(b".tar"))
    if labels is None and inner:
        return _list_inner_archives(archive, inner, outer, report)
    images, left_out = _images_of(outer)
    if labels is not None:
        part = _part(sorted(_row(member, name) for name, member in images.items()), left_out)
        part.entries["label"], classes = _labels_of(labels, part.names, numbering)
        return _joined("archive", ("",), classes, [part])
    if any(member.name.endswith(b".cls") for member in outer):
        raise DataError(f"{source} is a shard: put it into a folder of shards, and name the folder")
    by_class: dict[bytes, list[Row]] = {}
    folders = {name: name.removeprefix(b"./").split(b"/")[:-1] for name in images}
    # Folders above the class folders, as `tar cf train.tar train` writes them.
    above = len(os.path.commonprefix(list(folders.values())))  # noqa: RUF071, of lists, so by whole names
    if folders and all(len(inside) == above for inside in folders.values()):
        above -= 1
    for name, inside in folders.items():
        if len(inside) <= max(above, 0):
            raise DataError(
                f"{source} has images without a class ('{printable(_text(name))}'): name the file that "
                "has their classes: labels= (--labels)"
            )
        by_class.setdefault(inside[above], []).append(_row(images[name], name))
    names = sorted(by_class)
    parts = [_part(sorted(by_class[name]), {}) for name in names]
    for label, part in enumerate(parts):
        part.entries["label"] = label
    return _joined("archive", ("",), list(map(os.fsdecode, names)), parts, left_out)


def _images_of(files: Sequence[Member]) -> tuple[dict[bytes, Member], LeftOut]:
    """Returns the images of an archive by their names, and what is left out; the last of a name, as tar unpacks it."""
    images, left_out = dict[bytes, Member](), LeftOut()
    for member in files:
        if not is_image(member.name):
            leave_out(left_out, _text(member.name))
        elif member.name in images:
            leave_out(left_out, _text(member.name), "replaced by a later member of the same name")
        if is_image(member.name):
            images[member.name] = member
    return images, left_out


def _list_inner_archives(archive: Extent, inner: Sequence[Member], outer: Sequence[Member], report: Report) -> Index:
    """Lists the images of archives in an archive, whose names are the classes."""
    names = [tar.name.rpartition(b"/")[2].removesuffix(b".tar") for tar in inner]
    if len({*names}) < len(names):
        twice = _twice(list(map(_text, names)))
        raise DataError(f"{archive.title} has several archives {twice}.tar, which would be one class")

    def walked(tar: Member, label: int) -> _Part:
        title = f"{printable(_text(tar.name))} in {archive.title}"
        images, left_out = _images_of(list(members(Extent(archive.file, title, tar.offset, tar.offset + tar.size))))
        rows = [_row(member, names[label] + b"/" + name.removeprefix(b"./"), label) for name, member in images.items()]
        return _part(sorted(rows), left_out)

    parts = _in_threads(walked, inner, "classes", report)
    left_out = LeftOut()
    for member in outer:
        if not member.name.endswith(b".tar"):
            leave_out(left_out, _text(member.name))
    return _joined("archive", ("",), list(map(os.fsdecode, names)), parts, left_out)


# Files of labels: which class each image of a flat archive (ImageNet's validation set) is of.


def _labels_of(file: Path, names: Sequence[bytes], numbering: Path | None) -> tuple[NDArray[np.int32], list[str]]:
    """Returns the label of each of `names`, which are in order, int32 (n,), and the classes' names, in order.

    A line is a class of the image in that place (`n01751748`), or an image and its class (`NAME n01751748`, or with a
    comma, as Kaggle's LOC_val_solution.csv has it), or a number from 1, as ILSVRC2012_validation_ground_truth.txt has
    it. Such numbers are not in the order of the classes' names, so `numbering` must say what they mean.
    """
    # A line names the image with or without its ending.
    stems = [Path(_text(name)).stem for name in names]
    if len(distinct := {*stems}) < len(stems):
        raise DataError(f"{file}: several images have one name ('{_twice(stems)}'), and a line names one of them")
    lines = _label_rows(file, distinct)
    if not lines:
        raise DataError(f"{file} has no line")
    if len(lines[0]) == 1:
        if len(lines) != len(names):
            raise DataError(f"{file} has {len(lines):,} lines for {len(names):,} images")
        words = [line[0] for line in lines]
    else:
        by_stem: dict[str | None, str] = {}
        for line in lines:
            stem = _image_of(line[0], distinct)
            if len(line) > 1 and by_stem.setdefault(stem, line[1]) != line[1] and stem is not None:
                raise DataError(f"{file} has two classes for the image '{printable(stem)}'")
        absent = next((stem for stem in stems if not by_stem.get(stem)), None)
        if absent is not None:
            raise DataError(f"{file} has no class for the image '{printable(absent)}'")
        words = [by_stem[stem] for stem in stems]
    if all(map(_NUMBER.fullmatch, words)):
        if numbering is None:
            raise DataError(
                f"{file} has numbers, and not the names of classes; they are not in the order of the names. Say "
                "with numbering= (--numbering) which file has the class of each number (the devkit's map_clsloc.txt)"
            )
        meaning = _class_of_number(numbering)
        absent = next((word for word in words if int(word) not in meaning), None)
        if absent is not None:
            raise DataError(f"{numbering} does not list class {absent}, which {file} has")
        words = [meaning[int(word)] for word in words]
    classes = sorted(set(words))
    places = {name: place for place, name in enumerate(classes)}
    return np.array([places[word] for word in words], np.int32), classes


def _twice(names: Sequence[str]) -> str:
    """Returns a name that is there twice, fit to print."""
    return printable(min(name for name, count in collections.Counter(names).items() if count > 1))


def _label_rows(file: Path, stems: Set[str]) -> list[list[str]]:
    """Reads the lines of a file of labels: a class, or an image and its class, which may have spaces.

    With commas or semicolons it is CSV: quotes, a header and another order of the two columns are understood. Of
    Kaggle's LOC_val_solution.csv (ImageId,PredictionString) the class is the first word, before the boxes.
    """
    lines = _label_lines(file)
    delimiter = next((each for each in ",;" if lines and each in lines[0]), None)
    if delimiter is None:
        return [line.split(maxsplit=1) for line in lines]
    rows = [[field.strip() for field in row] for row in csv.reader(lines, delimiter=delimiter, skipinitialspace=True)]
    header = rows.pop(0) if not any(_image_of(field, stems) for field in rows[0]) else []
    if header[:2] == ["ImageId", "PredictionString"]:
        return [[row[0], row[1].partition(" ")[0]] for row in rows if len(row) > 1]
    image = next((place for place, field in enumerate(rows[0] if rows else ()) if _image_of(field, stems)), 0)
    others = [place for place in range(len(rows[0]) if rows else 0) if place != image]
    others = [place for place in others if header[place : place + 1] in (["label"], ["class"])] or others
    if len(others) > 1:
        raise DataError(f"{file} has several columns beside the image's name: keep that and the class")
    return [[row[image], row[others[0]]] if others and len(row) > max(image, *others) else row[:1] for row in rows]


def _image_of(field: str, stems: Set[str]) -> str | None:
    """Returns which image a field names, with its folders and ending or without; None: none of `stems`."""
    base = field.rpartition("/")[2]
    return next((stem for stem in (base, base.rpartition(".")[0]) if stem in stems), None)


def _class_of_number(file: Path) -> dict[int, str]:
    """Reads the class of each number from lines `n02119789 1 kit_fox`, `1 n02119789`, or the name alone, from 1."""
    classes: dict[int, str] = {}
    for place, line in enumerate(_label_lines(file), 1):
        words = line.split()
        numbers = [word for word in words[:2] if _NUMBER.fullmatch(word)]
        others = [word for word in words[:2] if not _NUMBER.fullmatch(word)]
        if not others or len(numbers) > 1:
            raise DataError(f"{file}, line {place}: a class's name and its number were expected")
        classes[int(numbers[0]) if numbers else place] = others[0]
    return classes


def _label_lines(file: Path) -> list[str]:
    with reading(file), file.open("rb") as stream:
        content = stream.read(MOST_LABEL_BYTES + 1)
    if len(content) > MOST_LABEL_BYTES:
        raise DataError(f"{file} is too large for a file of labels")
    return [line for line in content.decode("utf-8-sig", errors="replace").splitlines() if line.strip()]


# A folder of tar shards, in WebDataset's form: KEY.jpg next to KEY.cls or KEY.json.


def shard_names(source: Path) -> tuple[str, ...]:
    """Returns the shards of a folder, in order.

    Raises:
        DataError: one is missing: by the folder's manifest, or by a gap in their numbers.
    """
    there = shards_in(source)
    refuse_splits(source, map(split_of, there))
    if (source / MANIFEST).is_file():
        try:
            records = json.loads((source / MANIFEST).read_bytes())["shards"]
            sizes = {str(record["name"]): int(record["bytes"]) for record in records}
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataError(f"{source / MANIFEST} is damaged: pack the shards again") from None
        absent = sorted(sizes.keys() - set(there))
        for name in there:
            if name in sizes and (source / name).stat().st_size != sizes[name]:
                raise DataError(f"{source / name} differs in size from {MANIFEST}: copy it again")
    elif (source / BEGUN).is_file():
        raise DataError(f"{source} is not completely packed: the same grappe data pack command continues it")
    else:
        absent = list(_missing_numbers(there))
    if absent:
        more = f", and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise DataError(
            f"{source} lacks the shard {printable(absent[0])}{more}: copy it here too; without it this "
            "process would have fewer samples than others"
        )
    return tuple(there)


def shards_in(source: Path) -> list[str]:
    """Returns the names of the shards in a folder."""
    with reading(source):
        return sorted(place.name for place in source.glob("*.tar") if place.is_file())


def _missing_numbers(names: Sequence[str]) -> Iterator[str]:
    """Yields names that are missing between numbered ones: shard-000001.tar between shard-000000.tar and -000002."""
    numbered: dict[tuple[str, int], list[int]] = {}
    for name in names:
        if match := re.fullmatch(r"(.*?)([0-9]+)\.tar", name):
            numbered.setdefault((match[1], len(match[2])), []).append(int(match[2]))
    for (prefix, width), numbers in numbered.items():
        if min(numbers) < 2:  # otherwise the numbers may be years
            for number in sorted(set(range(min(numbers), max(numbers))) - set(numbers)):
                yield f"{prefix}{number:0{width}d}.tar"


def _list_shards(source: Path, report: Report) -> Index:
    """Lists a folder of shards: files whose names are alike up to the first dot are one sample."""
    shards = shard_names(source)
    for place in sorted(source.glob("[!.]*/*")):
        if is_image(os.fsencode(place.name)):
            raise DataError(
                f"{source} has shards ({printable(shards[0])}) and class folders ({printable(place.parent.name)}): "
                "move those away that are not meant"
            )
    parts = _in_threads(lambda name, number: _list_shard(source, name, number), shards, "shards", report)
    largest = max((int(part.entries["label"].max()) for part in parts if part.names), default=0)
    file = source / CLASSES
    numbers = list(map(str, range(largest + 1)))
    classes = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else numbers
    if len(classes) <= largest:
        raise DataError(f"{file} has {len(classes)} classes, and a sample has the label {largest}")
    return _joined("shards", shards, classes, parts)


def _list_shard(source: Path, name: str, number: int) -> _Part:
    rows, left_out, archive = [], LeftOut(), archive_in(source / name)
    for key, named in by_sample(archive, members(archive)):
        parts = {ending.lower(): member for ending, member in named.items()}
        images = [member for ending, member in parts.items() if b"." + ending in ENDINGS]
        dotted = next((member.name for ending, member in parts.items() if b"." in ending and is_image(ending)), None)
        if dotted is not None and not images:
            raise DataError(
                f"{archive.title}: '{printable(_text(dotted))}' has a dot in its sample's key, which ends at the first "
                "one: pack it under another name"
            )
        if len(images) > 1:
            raise DataError(f"{archive.title}: the sample '{printable(_text(key))}' has {len(images)} pictures")
        if not images:
            leave_out(left_out, _text(key), "samples without a picture")
            continue
        label: object = None
        if b"cls" in parts:
            text = parts[b"cls"].head.strip()
            label = int(text) if text.isdigit() and len(text) < 10 else None
        elif b"json" in parts:
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                record = json.loads(archive.file.read(min(parts[b"json"].size, 1 << 20), parts[b"json"].offset))
                label = next((record[name] for name in ("label", "cls", "class") if name in record), None)
        if type(label) is not int or not 0 <= label < 1 << 31:
            raise DataError(
                f"{archive.title}: the sample '{printable(_text(key))}' has no label that is a whole number: KEY.cls, "
                f'or "label" in KEY.json'
            )
        (image,) = images
        path = os.fsencode(name) + b"/" + image.name.removeprefix(b"./")
        rows.append(_row(image, path, label, file=number))
    return _part(rows, left_out)
