"""Checks: what is bad is listed with its reason, and left out from then on; what is odd and whole is not."""

from pathlib import Path

import pytest

from grappe.data import Images, RandomResizedCrop
from grappe.data.images.index import QUARANTINE
from grappe.errors import DataError
from grappe.verbs.data.walk import check, is_corpus
from tests.data.images.pictures import archive, files, folder, jpeg, part, png
from tests.data.images.test_decode import frame

ODD = {
    "cmyk": jpeg(part(1, mode="CMYK")),
    "grey": jpeg(part(2, mode="L")),
    "png": png(part(3)),
    "pixel": jpeg(part(4, 1, 1)),
}
BAD = {
    "bomb": (frame(65500, 65500), "its header gives 65500 x 65500 pixels: more than"),
    "cut": (jpeg(part(5))[:-300], "damaged or cut off"),
    "empty": (b"", "the file is empty"),
    "text": (b"<html>not found</html>", "no picture"),
}
VIEW = RandomResizedCrop(size=16)


def source(place: Path, kind: str) -> Path:
    found = {
        **files(),
        **{f"n01440764/odd_{name}.JPEG": one for name, one in ODD.items()},
        **{f"n02102040/bad_{name}.JPEG": one for name, (one, _) in BAD.items()},
    }
    return folder(place / "train", found) if kind == "folder" else archive(place / "train.tar", found)


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_what_is_bad_is_listed_and_left_out(tmp_path: Path, kind: str) -> None:
    place = source(tmp_path, kind)
    done = check(place)
    assert done.images == 24 + len(ODD) + len(BAD)
    assert [Path(name).stem.removeprefix("bad_") for name, _ in done.bad] == sorted(BAD)
    for name, reason in done.bad:
        assert reason.startswith(BAD[Path(name).stem.removeprefix("bad_")][1])
    assert done.quarantine == place.with_name(place.name + QUARANTINE)
    data = Images(place, VIEW)
    assert len(data) == 24 + len(ODD)
    assert data.left_out == len(BAD)
    for index in range(len(data)):
        assert data.sample(index, 1)[0].shape == (3, 16, 16)
    assert check(place) == done


def test_what_was_repaired_comes_back(tmp_path: Path) -> None:
    place = source(tmp_path, "folder")
    check(place)
    for name in BAD:
        (place / f"n02102040/bad_{name}.JPEG").write_bytes(jpeg(part(9)))
    done = check(place)
    assert done.bad == ()
    assert done.quarantine is None
    assert not place.with_name(place.name + QUARANTINE).exists()
    assert len(Images(place, VIEW)) == done.images


def test_where_most_are_bad_something_else_is_wrong(tmp_path: Path) -> None:
    found = {f"a/{number}.jpg": b"<html>" for number in range(5)} | {"a/good.jpg": jpeg(part(0))}
    with pytest.raises(DataError, match="5 of 6 images cannot be decoded"):
        check(folder(tmp_path / "train", found))
    assert not (tmp_path / f"train{QUARANTINE}").exists()


def test_what_is_left_out_or_turned_by_exif_is_counted(tmp_path: Path) -> None:
    turned = jpeg(part(3), exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0")
    found = {"a/0.jpg": turned, "a/1.jpg": jpeg(part(4)), "a/2.png": png(part(5)), "a/readme.txt": b"x"}
    done = check(folder(tmp_path / "train", found))
    assert (done.images, done.bad, done.turned, done.left_out) == (3, (), 1, {".txt": (1, "a/readme.txt")})


def test_pictures_or_rows_decide_what_a_folder_is(tmp_path: Path) -> None:
    place = folder(tmp_path / "train", {"a/0.jpg": jpeg(part(3))})
    for name in ("metadata.jsonl", "a/metadata.parquet", "a/._x.bin"):
        (place / name).write_bytes(b"")
    assert not is_corpus(place)
    (place / "rows.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match=r"has pictures \(train/a/0\.jpg\) and rows \(train/rows\.jsonl\)"):
        is_corpus(place)
    (place / "a/0.jpg").unlink()
    assert is_corpus(place)
