"""The small set of photos: the same files each time, of real photographs, in class folders."""

from pathlib import Path

import pytest
from benchmarks import photos

from grappe.data import CentreCrop, Images
from grappe.errors import UsageError


def content(place: Path) -> dict[str, bytes]:
    return {str(one.relative_to(place)): one.read_bytes() for one in place.rglob("*.jpg")}


def test_photos_are_cut_the_same_each_time(tmp_path: Path) -> None:
    done = photos.make_photos(tmp_path / "a", 40)
    photos.make_photos(tmp_path / "b", 40)
    photos.make_photos(tmp_path / "c", 40, seed=1)
    assert done.images == {"train": 40, "validation": 8}
    assert {"china", "flower"} <= set(done.photographs)
    assert content(tmp_path / "a") == content(tmp_path / "b") != content(tmp_path / "c")
    train, validation = (Images(tmp_path / "a" / split, CentreCrop(size=32)) for split in done.images)
    assert train.classes == validation.classes
    assert len(train.classes) == done.classes
    assert (len(train), len(validation)) == (40, 8)
    assert not set(content(tmp_path / "a/train").values()) & set(content(tmp_path / "a/validation").values())


def test_what_cannot_be_cut_is_said(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(UsageError, match="is there already"):
        photos.make_photos(tmp_path)
    monkeypatch.setattr(photos, "PHOTOGRAPHS", (("no_such_package", "a.jpg"),))
    with pytest.raises(UsageError, match="pip install scikit-learn"):
        photos.make_photos(tmp_path / "new")
    assert not (tmp_path / "new").exists()
