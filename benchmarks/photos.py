"""Cuts a small labelled set of photos from pictures that come with Python packages, to try things on.

python -m benchmarks.photos FOLDER --images 400
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import UsageError
from grappe.launch import files

if TYPE_CHECKING:
    from PIL.Image import Image

PHOTOGRAPHS = (
    ("sklearn", "datasets/images/china.jpg"),
    ("sklearn", "datasets/images/flower.jpg"),
    ("skimage", "data/astronaut.png"),
    ("skimage", "data/coffee.png"),
    ("skimage", "data/chelsea.png"),
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
)
"""Photographs in packages, which are not imported for them."""
_AREAS = (("left", 0.0, 0.5), ("right", 0.5, 1.0))
_VALIDATION = 5  # of so many photos one is for validation
_QUALITY = 90


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Result of cutting photos."""

    folder: Path
    photographs: tuple[str, ...]
    classes: int
    images: dict[str, int]
    """Photos of each split."""


def make_photos(to: Path, images: int = 1000, seed: int = 0) -> Cut:
    """Cuts photos into TO/train/CLASS and TO/validation/CLASS; the same files each time.

    A class is one half of one photograph, left or right; photos of it are parts of that half, of many sizes, and so may
    overlap, validation's too. It is a set to try commands and speeds on; accuracies on it mean nothing.

    Raises:
        UsageError: the folder is there, or no package with photographs is installed.
    """
    if to.exists():
        raise UsageError(f"{to} is there already: name a new folder")
    if not 1 <= images <= 1_000_000:
        raise UsageError(f"--images {images}: it must be 1 to 1,000,000")
    pictures = photographs()
    if not pictures:
        raise UsageError("no package with photographs is installed: pip install scikit-learn, or 'grappe[demo]'")
    areas = [
        (f"{name}-{side}", picture.crop((round(a * picture.width), 0, round(b * picture.width), picture.height)))
        for name, picture in pictures
        for side, a, b in _AREAS
    ]
    splits = {"train": images, "validation": -(-images // _VALIDATION)}
    to.mkdir(parents=True)
    for split, count in splits.items():
        (to / split).mkdir()
        for name, _ in areas:
            (to / split / name).mkdir()
        for number in range(count):
            name, area = areas[number % len(areas)]
            content = _jpeg(_part(area, random.Random(f"{seed} {split} {number}")))
            files.replace(to / split / name / f"{number:06d}.jpg", content)
    return Cut(folder=to, photographs=tuple(name for name, _ in pictures), classes=len(areas), images=splits)


def photographs() -> list[tuple[str, Image]]:
    """The photographs that are installed, by name."""
    from PIL import Image

    pictures = []
    for package, name in PHOTOGRAPHS:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            file = Path(place) / name
            if file.is_file():
                with Image.open(file) as picture:
                    pictures.append((file.stem, picture.convert("RGB")))
    return pictures


def _part(area: Image, draw: random.Random) -> Image:
    share = draw.uniform(0.3, 0.8)
    width, height = (max(1, round(share * length * draw.uniform(0.8, 1))) for length in area.size)
    left, top = draw.randint(0, area.width - width), draw.randint(0, area.height - height)
    return area.crop((left, top, left + width, top + height))


def _jpeg(picture: Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=_QUALITY)
    return stream.getvalue()


def main(words: Sequence[str] | None = None) -> None:
    """Cuts the photos that the command line asks for, and says what was written."""
    parser = argparse.ArgumentParser(description="Cut a small labelled set of photos, to try things on.")
    parser.add_argument("to", type=Path, help="a new folder")
    parser.add_argument("--images", type=int, default=1000, help="photos for training; a fifth as many for validation")
    parser.add_argument("--seed", type=int, default=0, help="another seed cuts other photos")
    options = parser.parse_args(words)
    try:
        done = make_photos(options.to, options.images, options.seed)
    except UsageError as error:
        parser.error(str(error))
    print(f"{done.folder}: {', '.join(f'{count:,} {split}' for split, count in done.images.items())}")
    print(f"{done.classes} classes: halves of {', '.join(done.photographs)}")


if __name__ == "__main__":
    main()
