"""Defines Images: a map-style dataset of labelled pictures in a folder, an archive or shards.

Shapes: S, the side of a sample in pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from grappe.data.draw import mix
from grappe.data.images.decode import NoPicture, View
from grappe.data.images.index import Reader, open_index, quarantined
from grappe.data.seeded import claims
from grappe.data.shards.selection import counts
from grappe.errors import DataError, TaskError
from grappe.errors.foreign_text import printable
from grappe.launch.rank import is_main_process
from grappe.launch.terminal import complain


class Images(Dataset[tuple[Tensor, int]]):
    """Labelled pictures, such as JPEG or PNG, read where they are: samples are pairs (uint8 [3, S, S], label).

    `source` is a folder of class folders; a tar archive of a tar for each class (ILSVRC2012_img_train.tar as it is
    downloaded) or of class folders; a folder of tar shards in WebDataset's form; or, with `labels`, a flat archive
    (ILSVRC2012_img_val.tar). Nothing is unpacked. Its headers are read once into an index next to it, or in the user's
    state folder where nothing can be written there; a changed source gets another. What `grappe data check` could not
    decode is left out.

    Args:
        source: the folder or archive.
        view: what makes a sample of a picture: `RandomResizedCrop(size=224)`, `CentreCrop(size=224)`, or a function
            of the file's bytes and the sample's key.
        labels: the file that says the classes of a flat archive: a line for each image in the order of their names, or
            lines of a name and a class.
        numbering: the file that says which class each number of `labels` is.
        classes: names of classes in the order of their labels, for validation usually the training set's. Default:
            the source's own, in the order of their names.

    Raises:
        DataError: the source is missing, damaged or of another form, or has a class that `classes` lacks.
    """

    def __init__(
        self,
        source: Path | str,
        view: View,
        *,
        labels: Path | str | None = None,
        numbering: Path | str | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.source = Path(source).absolute()
        self.view = view
        label_files = [None if file is None else Path(file).absolute() for file in (labels, numbering)]
        self._index = open_index(self.source, *label_files)[0]
        self._options: dict[str, Any] = {"labels": label_files[0], "numbering": label_files[1], "classes": classes}
        self.classes = tuple(classes or self._index.classes)
        """Names of the classes, by label."""
        others = [(name, label) for label, name in enumerate(self.classes) if name.isdecimal() and int(name) != label]
        if others and classes is None and is_main_process():
            name, label = others[0]
            complain(f"grappe: {self.source}: its classes are in the order of names: '{name}' is number {label}")
        # The label of each class of the index.
        self._label_of = np.arange(len(self._index.classes))
        if classes is not None:
            label_by_name = {name: label for label, name in enumerate(self.classes)}
            if len(label_by_name) < len(self.classes):
                raise TaskError("Images: classes= has a name twice")
            absent = sorted(set(self._index.classes) - set(label_by_name))
            if absent:
                raise DataError(
                    f"{self.source} has the class '{printable(absent[0])}', which classes= lacks ({len(absent)} in all)"
                )
            self._label_of = np.array([label_by_name[name] for name in self._index.classes], np.int64)
        self._reader = Reader(self.source, self._index)
        left_out = quarantined(self.source, self._index)
        self.left_out = len(left_out)
        """Images that are in quarantine."""
        # The k-th left-out place minus k: ids from there on are shifted by one more place.
        self._gaps = left_out - np.arange(len(left_out))
        if len(self) == 0:
            raise DataError(f"{self.source}: all of its {len(self._index):,} images are in quarantine")
        if self.left_out and is_main_process():
            complain(
                f"grappe: {self.source}: {len(self):,} of {len(self._index):,} images, {self.left_out:,} in quarantine"
            )
        if self._index.left_out and is_main_process():
            complain(f"grappe: {self.source}: left out: {counts(self._index.left_out)}")

    def numbered_as(self, other: Images) -> Images:
        """Returns these images with the class numbers of `other`, unless `classes=` has given them theirs.

        Raises:
            TaskError: there is a class that the other ones lack.
        """
        if self._options["classes"] is not None or self.classes == other.classes:
            return self
        absent = sorted(set(self.classes) - set(other.classes))
        if absent:
            raise TaskError(
                f"{self.source} has the class '{printable(absent[0])}', which {other.source} lacks ({len(absent)} in "
                "all): give both the same classes="
            )
        return Images(self.source, self.view, **self._options | {"classes": other.classes})

    def __len__(self) -> int:
        return len(self._index) - self.left_out

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # A training seeds torch's generator with the sample's key before it reads the sample.
        return self.sample(index, mix(torch.initial_seed(), index))

    @property
    def keyed(self) -> bool:
        """Returns whether the view says that samples depend on their keys alone; then threads may load them."""
        view = self.view
        return getattr(view, "keyed", False) is True and claims(type(view), "keyed", "__call__")

    def sample(self, index: int, key: int) -> tuple[Tensor, int]:
        """Returns a sample as its key says, the same for the same key; threads may call it at once.

        Raises:
            DataError: its file cannot be read or decoded.
        """
        place = self._place(index)
        data = self._reader.read(place)
        try:
            image = self.view(data, key)
        except NoPicture as error:
            raise DataError(
                f"{self._reader.name(place)}: {printable(error)}. Find all such files, and leave them out: "
                f"grappe data check {printable(self.source)}"
            ) from None
        return image, int(self._label_of[self._index.entries["label"][place]])

    def read(self, index: int) -> bytes:
        """Returns the content of an image's file."""
        return self._reader.read(self._place(index))

    def forget(self, index: int) -> None:
        """Has the system drop an image's bytes from memory, so that the next read is the disk's: for measuring."""
        self._reader.forget(self._place(index))

    def name(self, index: int) -> str:
        """The name of an image below the source, fit to print."""
        return printable(self._index.name(self._place(index)).decode(errors="replace"))

    def targets(self) -> NDArray[np.int64]:
        """Returns all labels: int64 (N,)."""
        places = np.delete(np.arange(len(self._index)), self._gaps + np.arange(self.left_out))
        return self._label_of[self._index.entries["label"][places]]

    def total_bytes(self) -> int:
        """The sum of all images' files, those in quarantine too."""
        return int(self._index.entries["size"].sum(dtype=np.uint64))

    def identity(self) -> Iterator[bytes]:
        """Yields bytes that differ between sets of images: names, sizes, labels, and images left out."""
        yield from (self._index.name_bytes.tobytes(), self._gaps.tobytes(), "\n".join(self.classes).encode())
        yield from (self._index.entries["size"].tobytes(), self._index.entries["label"].tobytes())

    def __reduce__(self) -> tuple[object, ...]:
        # Neither open files nor a mapped index can travel to another process: it opens them again.
        return functools.partial(Images, **self._options), (self.source, self.view)

    def _place(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        return index + int(np.searchsorted(self._gaps, index, side="right"))
