"""Real photographs cut into many, and sources made of them: folders, archives, shards."""

import functools
import io
import random
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("n01440764", "n01443537", "n02102040")


@functools.cache
def photographs() -> tuple[Image.Image, ...]:
    """The photographs that scikit-learn brings, 640 x 427."""
    from sklearn.datasets import load_sample_images

    return tuple(Image.fromarray(one) for one in load_sample_images().images)


def part(seed: int, least: int = 40, most: int = 400, mode: str = "RGB") -> Image.Image:
    """A part of one of the photographs, of a size of its own."""
    draw = random.Random(seed)
    photo = draw.choice(photographs())
    width, height = draw.randint(least, most), draw.randint(least, most)
    left, top = draw.randint(0, photo.width - width), draw.randint(0, photo.height - height)
    return photo.crop((left, top, left + width, top + height)).convert(mode)


def jpeg(picture: Image.Image, **options: object) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", **options)
    return stream.getvalue()


def png(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


@functools.cache
def files(count: int = 8, least: int = 40, most: int = 200) -> Mapping[str, bytes]:
    """Photos by CLASS/NAME.JPEG, `count` of each class."""
    return {
        f"{name}/{name}_{number}.JPEG": jpeg(part(100 * place + number, least, most), quality=90)
        for place, name in enumerate(CLASSES)
        for number in range(count)
    }


def folder(place: Path, found: Mapping[str, bytes]) -> Path:
    for name, content in found.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


def tar(found: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for name, content in found:
            told = tarfile.TarInfo(name)
            told.size = len(content)
            archive.addfile(told, io.BytesIO(content))
    return stream.getvalue()


def archive(place: Path, found: Mapping[str, bytes]) -> Path:
    """A tar of a tar for each class, as ImageNet comes; names are not in order."""
    inner: dict[str, list[tuple[str, bytes]]] = {}
    for name, content in found.items():
        inner.setdefault(name.partition("/")[0], []).append((name.partition("/")[2], content))
    place.write_bytes(tar((f"{name}.tar", tar(reversed(inner[name]))) for name in reversed(inner)))
    return place


def shards(place: Path, found: Mapping[str, bytes], each: int = 5) -> Path:
    place.mkdir()
    names = sorted({name.partition("/")[0] for name in found})
    items = list(found.items())
    for first in range(0, len(items), each):
        members = []
        for number, (name, content) in enumerate(items[first : first + each], first):
            members += [(f"{number:06d}.cls", b"%d" % names.index(name.partition("/")[0]))]
            members += [(f"{number:06d}.jpg", content)]
        (place / f"shard-{first // each:06d}.tar").write_bytes(tar(members))
    (place / "classes.txt").write_text("".join(f"{name}\n" for name in names))
    return place


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
