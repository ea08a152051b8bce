"""The same samples from a folder, an archive and shards; what changes is noticed; what is bad is left out by name."""

import os
import pickle
import random
import shutil
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grappe import Task
from grappe.data import CentreCrop, Images, RandomResizedCrop
from grappe.data.datasets import dataset_of, refuse_differing_classes
from grappe.data.images.index import INDEX, MOST_OPEN, QUARANTINE, described, open_index, write_quarantine
from grappe.data.images.listing import listing
from grappe.data.shards import index as index_file
from grappe.errors import DataError, TaskError
from tests.data.images.pictures import CLASSES, archive, files, folder, jpeg, part, shards, tar

VIEW = RandomResizedCrop(size=24)
SOURCES: dict[str, Callable[[Path, dict], Path]] = {
    "folder": lambda place, found: folder(place / "train", found),
    "archive": lambda place, found: archive(place / "train.tar", found),
    "shards": lambda place, found: shards(place / "shards", dict(sorted(found.items()))),
}
each_source = pytest.mark.parametrize("kind", SOURCES)


def made(tmp_path: Path, kind: str, found: dict | None = None) -> Path:
    return SOURCES[kind](tmp_path, dict(files()) if found is None else found)


@each_source
def test_samples_have_the_same_ids_wherever_they_lie(tmp_path: Path, kind: str) -> None:
    data = Images(made(tmp_path, kind), VIEW)
    assert data.classes == CLASSES
    assert len(data) == 24
    assert data.targets().tolist() == [place for place in range(3) for _ in range(8)]
    for index, name in enumerate(sorted(files())):
        assert data.read(index) == files()[name]
        assert kind == "shards" or data.name(index) == name
        image, label = data.sample(index, 7 + index)
        assert label == CLASSES.index(name.partition("/")[0])
        assert torch.equal(image, VIEW(files()[name], 7 + index))


def test_the_index_is_one_file_beside_the_source_and_is_read_again(tmp_path: Path, capsys) -> None:
    source = made(tmp_path, "archive")
    Images(source, VIEW)
    assert capsys.readouterr().err == f"grappe: reading the headers of {source}, once\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["train.tar", f"train.tar{INDEX}"]
    Images(source, VIEW)
    assert capsys.readouterr().err == ""


@each_source
def test_a_changed_source_is_read_anew_and_said(tmp_path: Path, kind: str, capsys) -> None:
    source = made(tmp_path, kind)
    Images(source, VIEW)
    shutil.rmtree(source) if source.is_dir() else source.unlink()
    fewer = {name: one for name, one in files().items() if "_3." not in name}
    made(tmp_path, kind, fewer)
    capsys.readouterr()
    data = Images(source, VIEW)
    assert "has changed since)" in capsys.readouterr().err
    assert [data.read(index) for index in range(len(data))] == [fewer[name] for name in sorted(fewer)]


@each_source
def test_a_source_of_the_same_size_and_time_is_known_by_its_headers(tmp_path: Path, kind: str, capsys) -> None:
    source = made(tmp_path, kind)
    Images(source, VIEW)
    changed = [source, *source.rglob("*")]
    times = {one: one.stat().st_mtime_ns for one in changed}
    if kind == "folder":
        victim = source / next(iter(files()))
        victim.write_bytes(victim.read_bytes()[:-1])
    else:
        victim = source if kind == "archive" else source / "shard-000000.tar"
        content = victim.read_bytes()
        at = content.rindex(b"_0.JPEG") if kind == "archive" else content.index(b"000000.jpg")
        at -= at % 512
        header = bytearray(content[at : at + 512])
        header[115] ^= 1  # the owner's number
        header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 256)
        victim.write_bytes(content[:at] + header + content[at + 512 :])
    for one, time in times.items():
        os.utime(one, ns=(time, time))
    capsys.readouterr()
    Images(source, VIEW)
    assert "reading the headers" in capsys.readouterr().err


@each_source
def test_a_file_that_is_replaced_meanwhile_is_noticed(tmp_path: Path, kind: str) -> None:
    source = made(tmp_path, kind)
    data = Images(source, VIEW)
    data.sample(0, 0)
    if kind == "folder":
        (source / sorted(files())[0]).write_bytes(b"another")
        (source / sorted(files())[1]).unlink()
        with pytest.raises(DataError, match=r"n01440764_1.JPEG cannot be read: No such file"):
            data.sample(1, 0)
    else:
        victim = source if kind == "archive" else source / "shard-000000.tar"
        with victim.open("r+b") as stream:  # in its place, under the open file
            stream.write(os.urandom(victim.stat().st_size))
    with pytest.raises(DataError, match="a file was replaced"):
        data.sample(0, 0)


def test_damaged_indexes_are_made_anew(tmp_path: Path, capsys) -> None:
    source = made(tmp_path, "archive")
    expected = Images(source, VIEW).targets().tolist()
    file = tmp_path / f"train.tar{INDEX}"
    content = file.read_bytes()
    draw = random.Random(0)
    for attempt in range(60):
        damaged = bytearray(content)
        if attempt % 3 == 0:
            damaged = damaged[: draw.randrange(len(damaged))]
        else:
            for _ in range(5):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        file.write_bytes(damaged)
        capsys.readouterr()
        assert Images(source, VIEW).targets().tolist() == expected
        assert ("grappe.npy: it is" in capsys.readouterr().err) == (damaged != content)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    """Whoever writes an index can give it the right hash."""
    (tmp_path / "secret.JPEG").write_bytes(jpeg(part(0)))
    source = made(tmp_path, "folder")
    listed = listing(source, None, None, print)
    names = [listed.name(place) for place in range(len(listed))]
    facts = (tmp_path / "secret.JPEG").stat()
    for name in (b"../secret.JPEG", os.fsencode(tmp_path / "secret.JPEG")):
        names[11] = name
        listed.entries[11] = (facts.st_mtime_ns, facts.st_size, 0, 0, 0)
        listed_files, description, (entries, *_) = described(source, listed, (None, None))
        arrays = entries, np.cumsum(list(map(len, names)), dtype=np.uint64), np.frombuffer(b"".join(names), np.uint8)
        index_file.write(tmp_path / f"train{INDEX}", (listed_files, description, arrays))
        with pytest.raises(DataError, match="changed after it was"):
            Images(source, VIEW).read(11)


def test_a_pickled_index_is_not_unpickled(tmp_path: Path, capsys) -> None:
    source = made(tmp_path, "archive")

    class Bomb:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "exploded"),)

    np.save(tmp_path / f"train.tar{INDEX}", np.array([Bomb()], object), allow_pickle=True)
    Images(source, VIEW)
    assert "it is another file" in capsys.readouterr().err
    assert not (tmp_path / "exploded").exists()


def test_where_nothing_can_be_written_the_index_is_the_users(tmp_path: Path, monkeypatch) -> None:
    source = made(tmp_path, "archive")
    real = os.open

    def refused(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_CREAT and f".train.tar{INDEX}" == str(path)[: len(f".train.tar{INDEX}")]:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refused)
    found, file = open_index(source)
    assert len(found) == 24
    assert file.is_relative_to(os.environ["XDG_STATE_HOME"])
    assert open_index(source)[1] == file


def test_images_in_quarantine_are_left_out_by_name(tmp_path: Path, capsys) -> None:
    source = made(tmp_path, "folder")
    names = sorted(files())
    whole = Images(source, VIEW)
    write_quarantine(source, whole._index, {0: "bad", 9: "bad\x1b[2J", 10: "bad", 23: "bad"})
    kept = [name for place, name in enumerate(names) if place not in (0, 9, 10, 23)]
    capsys.readouterr()
    data = Images(source, VIEW)
    assert "20 of 24 images, 4 in quarantine" in capsys.readouterr().err
    assert [data.name(index) for index in range(len(data))] == kept
    assert len(data.targets()) == len(data) == 20
    assert [data.sample(index, 0)[1] for index in range(20)] == data.targets().tolist()
    with pytest.raises(IndexError):
        data.sample(20, 0)
    assert b"\x1b" not in (tmp_path / f"train{QUARANTINE}").read_bytes()
    (source / names[0]).unlink()
    with pytest.raises(DataError, match=r"n01440764_0.JPEG', which .* does not have"):
        Images(source, VIEW)


def test_a_bad_file_is_named_with_the_command_that_finds_all(tmp_path: Path) -> None:
    found = dict(files())
    found[sorted(found)[4]] = found[sorted(found)[4]][:200]
    data = Images(made(tmp_path, "archive", found), VIEW)
    with pytest.raises(DataError, match=r"n01440764_4.JPEG: damaged or cut off.*: grappe data check .*train.tar"):
        data.sample(4, 0)


def test_a_missing_shard_is_an_error_and_no_smaller_dataset(tmp_path: Path) -> None:
    source = made(tmp_path, "shards")
    for known in (False, True):
        (source / "shard-000002.tar").rename(tmp_path / "away")
        with pytest.raises(DataError, match=r"shard-000002.tar"):
            Images(source, VIEW)
        (tmp_path / "away").rename(source / "shard-000002.tar")
        Images(source, VIEW)
        assert known or (tmp_path / f"shards{INDEX}").exists()
    (source / "shard-000004.tar").unlink()  # the last: only the index knows
    with pytest.raises(DataError, match=r"shard-000004.tar is missing .* put it back"):
        Images(source, VIEW)


def test_more_shards_than_may_be_open(tmp_path: Path) -> None:
    found = {f"{CLASSES[0]}/{number:03d}.jpg": jpeg(part(number, 9, 20)) for number in range(MOST_OPEN + 20)}
    data = Images(shards(tmp_path / "many", found, each=1), RandomResizedCrop(size=8))
    before = len(list(Path("/proc/self/fd").iterdir()))
    seen: list[bytes] = []

    def read(start: int) -> None:
        seen.extend(data.read(index) for index in range(start, len(data), 4))

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(seen) == sorted(found.values())
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + MOST_OPEN


def test_shards_need_labels(tmp_path: Path) -> None:
    source = made(tmp_path, "shards")
    for label, words in ((b"x", "no label that is a whole number"), (b"-1", "no label"), (b"3", "has 3 classes, and")):
        (source / "shard-000000.tar").write_bytes(tar([("a.jpg", jpeg(part(0))), ("a.cls", label)]))
        with pytest.raises(DataError, match=words):
            Images(source, VIEW)


def test_labels_in_json(tmp_path: Path) -> None:
    source = tmp_path / "shards"
    source.mkdir()
    members = [("x/a.b.jpg", b"no"), ("x/a.jpg", jpeg(part(0))), ("x/a.json", b'{"label": 1}'), ("x/b.txt", b"text")]
    (source / "only.tar").write_bytes(tar(members[1:]))
    data = Images(source, VIEW)
    assert data.targets().tolist() == [1]
    assert data.name(0) == "only.tar/x/a.jpg"


VALIDATION = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 7)]
TRUTH = [CLASSES[place] for place in (2, 0, 1, 1, 2, 0)]


def validation() -> list[tuple[str, bytes]]:
    return [(name, jpeg(part(number, 20, 60))) for number, name in enumerate(VALIDATION, 1)]


@pytest.mark.parametrize(
    ("lines", "numbering"),
    [
        (TRUTH, None),
        ([f"{name} {wnid}" for name, wnid in zip(VALIDATION, TRUTH, strict=True)], None),
        (
            ["ImageId,PredictionString", *(f"{n[:-5]},{w} 1 2 3 4" for n, w in zip(VALIDATION, TRUTH, strict=True))],
            None,
        ),
        (
            [str({2: 1, 0: 2, 1: 3}[CLASSES.index(one)]) for one in TRUTH],
            ["n02102040 1 a", "n01440764 2 b", "n01443537 3 c"],
        ),
    ],
)
def test_the_validation_archive_takes_its_labels_from_a_file(tmp_path, lines, numbering):
    (tmp_path / "val.tar").write_bytes(tar(reversed(validation())))
    (tmp_path / "labels.txt").write_text("\n".join(lines))
    more = {}
    if numbering:
        with pytest.raises(DataError, match="numbers, and not the names of classes"):
            Images(tmp_path / "val.tar", CentreCrop(size=8), labels=tmp_path / "labels.txt")
        (tmp_path / "map.txt").write_text("\n".join(numbering))
        more = {"numbering": tmp_path / "map.txt"}
    data = Images(tmp_path / "val.tar", CentreCrop(size=8), labels=tmp_path / "labels.txt", **more)
    assert [data.classes[label] for label in data.targets()] == TRUTH
    assert [data.name(index) for index in range(6)] == VALIDATION
    other = Images(
        tmp_path / "val.tar", CentreCrop(size=8), labels=tmp_path / "labels.txt", **more, classes=["zebra", *CLASSES]
    )
    assert other.targets().tolist() == [label + 1 for label in data.targets()]


def test_labels_that_do_not_fit_are_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "val.tar").write_bytes(tar(validation()))
    file = tmp_path / "labels.txt"

    def images(**more: object) -> Images:
        return Images(tmp_path / "val.tar", CentreCrop(size=8), labels=file, **more)

    file.write_text("\n".join(TRUTH[:-1]))
    with pytest.raises(DataError, match="5 lines for 6 images"):
        images()
    file.write_text("other n01440764")
    with pytest.raises(DataError, match="no class for the image 'ILSVRC2012_val_00000001'"):
        images()
    file.write_text("\n".join(TRUTH))
    images()
    file.write_text("\n".join(reversed(TRUTH)))
    assert [images().classes[one] for one in images().targets()] == TRUTH[::-1]
    assert "the file of labels has changed" in capsys.readouterr().err
    with pytest.raises(DataError, match="'n01440764', which classes= lacks"):
        images(classes=["zebra"])
    with pytest.raises(TaskError, match="twice"):
        images(classes=["zebra", "zebra"])
    with pytest.raises(DataError, match=r"labels= \(--labels\)"):
        Images(tmp_path / "val.tar", VIEW)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda place: None, "no such file"),
        (lambda place: place.mkdir(), "no class folders"),
        (lambda place: folder(place, {"a/b.txt": b"text"}), "no image"),
        (lambda place: place.write_bytes(tar([("a/b.txt", b"text")])), "no image"),
        (lambda place: place.write_bytes(tar([("a.jpg", jpeg(part(0))), ("a.cls", b"0")])), "is a shard"),
    ],
)
def test_what_is_no_source_says_what_one_is(tmp_path: Path, make: Callable, words: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(DataError, match=words):
        Images(tmp_path / "x", VIEW)


def test_a_dataset_travels_to_another_process(tmp_path: Path) -> None:
    data = Images(made(tmp_path, "archive"), VIEW)
    other = pickle.loads(pickle.dumps(data))
    assert torch.equal(other.sample(5, 3)[0], data.sample(5, 3)[0])
    assert len(pickle.dumps(data)) < 1000


def test_other_files_are_left_out(tmp_path: Path) -> None:
    found = {
        **files(),
        f"{CLASSES[0]}/._a.JPEG": b"x",
        f"{CLASSES[0]}/readme.txt": b"x",
        f"{CLASSES[1]}/deep/a.png": b"x",
    }
    data = Images(made(tmp_path, "folder", found), VIEW)
    assert len(data) == 25
    assert {kind: count for kind, (count, _) in data._index.left_out.items()} == {"hidden": 1, ".txt": 1}
    assert data.classes == CLASSES


@pytest.mark.parametrize(
    "text",
    [
        "filename,label\n0.jpg,golden retriever\n1.jpg,golden eagle\n2.jpg,polar bear\n",
        '\ufeff"golden retriever","0.jpg"\n"golden eagle","1.jpg"\n"polar bear","2.jpg"\n',
        "0.jpg; golden retriever\n1.jpg; golden eagle\n2.jpg; polar bear\n",
        "box,image,label\n3 4,0,golden retriever\n1 2,1,golden eagle\n5 6,2,polar bear\n",
        "0.jpg golden retriever\n1.jpg golden eagle\n2.jpg polar bear\n",
    ],
)
def test_names_of_classes_may_have_spaces(tmp_path: Path, text: str) -> None:
    (tmp_path / "val.tar").write_bytes(tar((f"{number}.jpg", jpeg(part(number, 20, 60))) for number in range(3)))
    (tmp_path / "labels.csv").write_text(text)
    data = Images(tmp_path / "val.tar", VIEW, labels=tmp_path / "labels.csv")
    assert [data.classes[label] for label in data.targets()] == ["golden retriever", "golden eagle", "polar bear"]


def test_a_split_that_lacks_a_class_keeps_the_numbers_of_training(tmp_path: Path) -> None:
    class Pictures(Task):
        """Pictures of a folder for each split."""

        def data(self, split: str, folder: Path) -> Images:
            return Images(folder / split, VIEW)

    everything = files(2, 20, 60)
    folder(tmp_path / "train", everything)
    folder(tmp_path / "validation", {name: picture for name, picture in everything.items() if CLASSES[1] not in name})
    data = dataset_of(Pictures(), "validation", tmp_path)
    assert data.classes == tuple(sorted(CLASSES))
    assert sorted(set(data.targets().tolist())) == [0, 2]
    folder(tmp_path / "validation", {"zebra/0.JPEG": everything[next(iter(everything))]})
    with pytest.raises(TaskError, match=r"validation has the class 'zebra', which .*train lacks \(1 in all\)"):
        dataset_of(Pictures(), "validation", tmp_path)


def test_other_datasets_have_the_same_classes_in_both_splits() -> None:
    def of(*classes: str) -> Any:
        return types.SimpleNamespace(classes=classes)

    refuse_differing_classes(of("ant", "bee"), of("ant", "bee"))
    refuse_differing_classes(of("ant", "bee"), of("ant"))
    refuse_differing_classes(of("ant"), object())
    refuse_differing_classes(of(1, 0, 2), of(2, 2, 1))  # labels of the samples, under this name
    refuse_differing_classes(of("ant", "bee", "ant"), of("bee", "ant"))
    tensors = (types.SimpleNamespace(classes=torch.tensor(values)) for values in ([1, 0], [0, 1]))
    refuse_differing_classes(*tensors)
    with pytest.raises(DataError, match=r"the class 'cat' has number 1 in validation and is number 2 in training"):
        refuse_differing_classes(of("ant", "bee", "cat"), of("ant", "cat"))


@pytest.mark.parametrize("names", [("0", "1", "2"), ("000", "001"), ("a", "b"), ("0", "10", "2")])
def test_classes_that_are_named_by_numbers_say_so_where_theirs_are_others(tmp_path: Path, names, capsys) -> None:
    source = folder(tmp_path / "train", {f"{name}/a.jpg": jpeg(part(0)) for name in names})
    assert Images(source, VIEW).classes == names
    assert ("order of names: '10' is number 1" in capsys.readouterr().err) == (names == ("0", "10", "2"))
    Images(source, VIEW, classes=[*names, "more"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("v.1,cat", "v.2,dog"), ""),
        (("v.1.png,cat", "v.2,dog", "v.1,cat"), ""),
        (("v.1,cat", "v.1,dog", "v.2,dog"), "two classes for the image 'v.1'"),
        (("v.1,", "v.2,dog"), "no class for the image 'v.1'"),
        (("v.2,dog",), "no class for the image 'v.1'"),
    ],
)
def test_each_image_has_one_class_in_a_file_of_labels(tmp_path: Path, lines, words: str) -> None:
    (tmp_path / "val.tar").write_bytes(tar((f"v.{number}.jpg", jpeg(part(number, 20, 60))) for number in (1, 2)))
    (tmp_path / "labels.csv").write_text("\n".join(("id,label", *lines)))
    if not words:
        assert Images(tmp_path / "val.tar", VIEW, labels=tmp_path / "labels.csv").targets().tolist() == [0, 1]
        return
    with pytest.raises(DataError, match=words):
        Images(tmp_path / "val.tar", VIEW, labels=tmp_path / "labels.csv")
