"""Listings: a source means the same in every container, and what is not read of it is counted or refused by name."""

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from PIL import Image

from grappe.data import CentreCrop, Images
from grappe.errors import DataError
from tests.data.images import pictures
from tests.data.images.pictures import folder, jpeg, part

VIEW = CentreCrop(size=8)
PICTURE = jpeg(part(1))


def tar(place: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(pictures.tar(members))
    return place


def encoded(kind: str, mode: str = "RGB", **options: object) -> bytes:
    stream = io.BytesIO()
    part(2, mode=mode).save(stream, kind, **options)
    return stream.getvalue()


OTHERS = {
    "a.bmp": encoded("BMP"),
    "b.gif": encoded("GIF"),
    "c.tif": encoded("TIFF"),
    "d.TIFF": encoded("TIFF", "CMYK"),
    "e.webp": encoded("WEBP"),
    "f.ppm": encoded("PPM"),
    "g.pgm": encoded("PPM", "L"),
    "h.jfif": PICTURE,
}


@pytest.mark.parametrize("container", ["folder", "archive", "shards"])
def test_pictures_of_other_endings_are_read(tmp_path: Path, container: str, capfd) -> None:
    if container == "shards":
        members = [(f"{name.lower()[0]}.{ending}", content) for name, content in OTHERS.items()
                   for ending, content in (("cls", b"0"), (name.partition(".")[2], content))]  # fmt: skip
        place = tar(tmp_path / "s/a.tar", members).parent
    else:
        found = {f"ant/{name}": content for name, content in OTHERS.items()}
        place = folder(tmp_path / "f", found) if container == "folder" else tar(tmp_path / "a.tar", found.items())
    data = Images(place, VIEW)
    assert len(data) == len(OTHERS)
    for number, content in enumerate(OTHERS.values()):
        height_first = Image.open(io.BytesIO(content)).convert("RGB").size[::-1]
        assert data.sample(number, 0)[0].shape == (3, 8, 8) and min(height_first) >= 8
    assert "left out" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (encoded("TIFF", "I"), "pixels of the mode I"),
        (encoded("GIF", save_all=True, append_images=[part(3)]), "it has 2 frames or pages"),
        (encoded("WEBP")[:40], "damaged or cut off|no picture"),
    ],
)
def test_pictures_without_one_meaning_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    data = Images(folder(tmp_path, {"ant/a.tif": content}), VIEW)
    with pytest.raises(DataError, match=rf"ant/a\.tif: ({words})"):
        data.sample(0, 0)


@pytest.mark.parametrize("above", ["", "./", "train/", "data/train/"])
@pytest.mark.parametrize("inside", ["", "2023/"])
def test_an_archive_has_the_classes_of_its_folder(tmp_path: Path, above: str, inside: str) -> None:
    names = [f"{name}/{inside}{number}.jpg" for name in ("ant", "bee") for number in range(2)]
    names += ["ant/2024/deep/9.jpg"] if inside else []
    there = Images(folder(tmp_path / "f", dict.fromkeys(names, PICTURE)), VIEW)
    packed = Images(tar(tmp_path / "a.tar", [(above + name, PICTURE) for name in names]), VIEW)
    assert there.classes == packed.classes == ("ant", "bee")
    assert there.targets().tolist() == packed.targets().tolist()
    assert [there.name(place) for place in range(len(there))] == [
        packed.name(place).removeprefix(above) for place in range(len(packed))
    ]


def test_images_above_the_class_folders_of_an_archive_are_refused(tmp_path: Path) -> None:
    names = ["train/ant/0.jpg", "train/bee/0.jpg", "train/1.jpg"]
    with pytest.raises(DataError, match=r"images without a class \('train/1\.jpg'\)"):
        Images(tar(tmp_path / "a.tar", [(name, PICTURE) for name in names]), VIEW)


def test_what_a_folder_has_beside_pictures_is_said_at_the_start(tmp_path: Path, capfd) -> None:
    found = dict.fromkeys(("ant/0.jpg", "cat/0.jpg", "cat/.ipynb_checkpoints/0-checkpoint.jpg"), PICTURE)
    place = folder(tmp_path / "f", found | {"metadata.jsonl": b"{}", "bee/0.heic": b"x", "bee/notes.txt": b"x"})
    (place / "dog").mkdir()
    (place / "ant/more").symlink_to(place / "cat")
    data = Images(place, VIEW)
    assert data.classes == ("ant", "cat") and data.targets().tolist() == [0, 1]
    told = capfd.readouterr().err
    for words in (".heic 1 (bee/0.heic)", ".jsonl 1 (metadata.jsonl)", "folders without a picture 2 (", "hidden 1 (",
                  "linked folders 1 (ant/more)"):  # fmt: skip
        assert words in told
    assert [data.sample(place, 0)[1] for place in range(2)] == [0, 1]
    Images(place, VIEW)
    assert "left out: .heic 1" in capfd.readouterr().err  # of an index that was there, too


def test_the_last_of_several_members_of_a_name_is_taken(tmp_path: Path, capfd) -> None:
    other = jpeg(part(5))
    place = tar(tmp_path / "a.tar", [("ant/0.jpg", PICTURE), ("bee/0.jpg", PICTURE), ("ant/0.jpg", other)])
    data = Images(place, VIEW)
    assert [data.read(number) for number in range(len(data))] == [other, PICTURE]
    assert "replaced by a later member of the same name 1 (ant/0.jpg)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (["22.05.jpg", "22.05.cls"], r"'22\.05\.jpg' has a dot in its sample's key"),
        (["a.jpg", "b.cls", "b.jpg", "a.cls"], r"'a\.cls' is no neighbour of its sample's other members"),
        (["a.jpg", "a.cls", "a.jpg"], r"'a\.jpg' is there twice"),
        (["a.jpg", "a.cls", "a.webp"], r"the sample 'a' has 2 pictures"),
    ],
)
def test_shards_whose_samples_are_not_clear_are_refused(tmp_path: Path, members: list[str], words: str) -> None:
    first = [("0.cls", b"0"), ("0.jpg", PICTURE)]
    tar(tmp_path / "s/s-000000.tar", [*first, *((name, b"0" if name.endswith("cls") else PICTURE) for name in members)])
    if members == ["a.jpg", "b.cls", "b.jpg", "a.cls"]:
        words = rf"{words}|the sample 'a' has no label"
    with pytest.raises(DataError, match=words):
        Images(tmp_path / "s", VIEW)


def test_samples_of_a_shard_without_a_picture_are_said(tmp_path: Path, capfd) -> None:
    tar(tmp_path / "s/s-000000.tar", [("0.cls", b"0"), ("0.jpg", PICTURE), ("1.cls", b"0"), ("1.heic", b"x")])
    assert len(Images(tmp_path / "s", VIEW)) == 1
    assert "samples without a picture 1 (1)" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "archive", "shards"])
def test_several_splits_in_one_source_are_refused(tmp_path: Path, kind: str) -> None:
    names = ["train/ant/0.jpg", "val/ant/0.jpg"]
    if kind == "folder":
        place = folder(tmp_path / "f", dict.fromkeys(names, PICTURE))
    elif kind == "archive":
        place = tar(tmp_path / "a.tar", [(name, PICTURE) for name in names])
    else:
        for name in ("train", "val"):
            tar(tmp_path / f"s/{name}-000000.tar", [("0.cls", b"0"), ("0.jpg", PICTURE)])
        place = tmp_path / "s"
    with pytest.raises(DataError, match=r"several splits \(train, val\)"):
        Images(place, VIEW)


def test_class_folders_beside_shards_are_refused(tmp_path: Path) -> None:
    folder(tmp_path / "s", {"ant/0.jpg": PICTURE})
    tar(tmp_path / "s/backup.tar", [("0.cls", b"0"), ("0.jpg", PICTURE)])
    with pytest.raises(DataError, match=r"has shards \(backup\.tar\) and class folders \(ant\)"):
        Images(tmp_path / "s", VIEW)


@pytest.mark.parametrize("kind", ["class", "inside", "archive"])
def test_names_that_are_not_utf8_are_one_message(tmp_path: Path, kind: str) -> None:
    name = os.fsdecode(b"caf\xe9")
    if kind == "archive":
        place = tmp_path / "a.tar"
        with tarfile.open(place, "w", encoding="utf-8", errors="surrogateescape") as archive:
            for each in ("ant", name):
                member = tarfile.TarInfo(f"{each}/0.jpg")
                member.size = len(PICTURE)
                archive.addfile(member, io.BytesIO(PICTURE))
    else:
        inside = f"{name}/0.jpg" if kind == "class" else f"ant/{name}/0.jpg"
        place = folder(tmp_path / "f", {"bee/0.jpg": PICTURE, inside: PICTURE})
    with pytest.raises(DataError, match=r"caf\\udce9 has a name that is not UTF-8.*convmv"):
        Images(place, VIEW)
    good = folder(tmp_path / "g", {f"ant/{name}.jpg": PICTURE})  # of a file it may be so
    assert len(Images(good, VIEW)) == 1


def test_a_replaced_picture_has_the_next_start_make_the_index_again(tmp_path: Path) -> None:
    place = folder(tmp_path / "f", {f"ant/{number:02d}.jpg": PICTURE for number in range(40)})
    Images(place, VIEW)
    (place / "ant/03.jpg").write_bytes(jpeg(part(9)))
    data = Images(place, VIEW)
    with pytest.raises(DataError, match="Start again, which makes the index again"):
        [data.sample(number, 0) for number in range(40)]
    data = Images(place, VIEW)
    assert [data.sample(number, 0)[1] for number in range(40)] == [0] * 40


def test_several_images_of_one_name_have_no_labels(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("a.jpg,ant\nb.jpg,bee\n")
    twice = tar(tmp_path / "w.tar", [("x/a.jpg", PICTURE), ("y/a.jpg", PICTURE)])
    with pytest.raises(DataError, match=r"several images have one name \('a'\)"):
        Images(twice, VIEW, labels=tmp_path / "labels.csv")
