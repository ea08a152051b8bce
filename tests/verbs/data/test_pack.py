"""Packed shards: the same samples in the same order, the same bytes each time, whole after any kill."""

import hashlib
import io
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from grappe.data import CentreCrop, Images
from grappe.data.images.listing import MANIFEST
from grappe.errors import DataError, UsageError
from grappe.verbs.data.pack import Packing, pack, smaller
from grappe.verbs.data.walk import check
from tests.data.images.pictures import CLASSES, archive, files, folder, jpeg, part, pixels, png
from tests.faults.test_crash_states import states
from tests.faults.trace import rebuild, recording

FORM = Packing(short=64, per_shard=7)


def tree(place: Path) -> dict[str, str]:
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in sorted(place.iterdir())}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return archive(tmp_path_factory.mktemp("pack") / "train.tar", files())


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    done = pack(source, source.with_name("packed"), FORM)
    assert [one.samples for one in done.shards] == [7, 7, 7, 3]
    return done.folder


def test_samples_keep_their_ids(source: Path, packed: Path) -> None:
    one, other = Images(source, CentreCrop(size=32)), Images(packed, CentreCrop(size=32))
    assert other.classes == one.classes == CLASSES
    assert other.targets().tolist() == one.targets().tolist()
    for index in range(len(one)):
        before, after = pixels(one.read(index)), pixels(other.read(index))
        assert min(after.shape[:2]) == min(64, *before.shape[:2])
        if min(before.shape[:2]) <= 64:
            assert other.read(index) == one.read(index)
        near = np.asarray(Image.fromarray(before).resize(after.shape[1::-1], Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(near - after).mean() < 12


def test_a_shard_is_a_plain_tar_of_webdatasets_form(packed: Path) -> None:
    with tarfile.open(packed / "shard-000001.tar") as one:
        members = one.getmembers()
        assert [member.name for member in members[:4]] == [
            "00000007.cls", "00000007.jpg", "00000008.cls", "00000008.jpg",
        ]  # fmt: skip
        assert {(member.uid, member.mtime, member.uname) for member in members} == {(0, 0, "")}
        content = one.extractfile(members[2])
        assert content.read() == b"1"


def test_the_same_bytes_each_time(source: Path, packed: Path, tmp_path: Path) -> None:
    unpacked = folder(tmp_path / "train.tar", files())
    again = pack(unpacked, tmp_path / "packed", FORM)  # of a folder, by the same name
    assert tree(again.folder) == tree(packed)
    assert pack(unpacked, again.folder, FORM).were_there == 4
    assert tree(again.folder) == tree(packed)


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(source: Path, packed: Path, tmp_path: Path) -> None:
    """With a real kill, from before the first shard is there to behind the last."""
    code = (
        "import sys, time; from pathlib import Path; from grappe.verbs.data import pack\n"
        "real = pack.files.replace\n"
        "def slow(*a, **k):\n time.sleep(0.05); real(*a, **k); print(a[0].name, flush=True)\n"
        "pack.files.replace = slow\n"
        "pack.pack(Path(sys.argv[1]), Path(sys.argv[2]), pack.Packing(short=64, per_shard=7))\n"
    )
    for lines in (1, 4):
        to = tmp_path / str(lines)
        with subprocess.Popen(
            [sys.executable, "-c", code, str(source), str(to)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert len(list(itertools.islice(process.stdout, lines))) == lines
            time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        if not (to / MANIFEST).exists():
            with pytest.raises(DataError, match=r"not completely packed|no class folders"):
                Images(to, CentreCrop(size=8))
        (to / ".shard-000003.tar.0123abcd").write_bytes(b"half of one")
        pack(source, to, FORM)
        assert tree(to) == tree(packed)


def test_a_full_disk_leaves_whole_shards(source: Path, packed: Path, tmp_path: Path, monkeypatch) -> None:
    calls = itertools.count()
    real = os.fsync

    def full(handle: int) -> None:
        if next(calls) == 6:  # .pack.json and two shards, each with its folder
            raise OSError(122, "Disk quota exceeded")
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            DataError, match=r"shard-000002.tar cannot be written: Disk quota exceeded. 2 shards are complete"
        ):
            pack(source, tmp_path / "to", FORM)
    assert [one for one in tree(tmp_path / "to") if "shard" in one] == ["shard-000000.tar", "shard-000001.tar"]
    assert pack(source, tmp_path / "to", FORM).were_there == 2
    assert tree(tmp_path / "to") == tree(packed)


def test_a_bad_image_stops_it_and_a_quarantine_lets_it_go_on(tmp_path: Path) -> None:
    found = dict(files())
    found[sorted(found)[3]] = found[sorted(found)[3]][:500]
    place = folder(tmp_path / "train", found)
    with pytest.raises(DataError, match=r"n01440764_3.JPEG: damaged .*grappe data check"):
        pack(place, tmp_path / "one", FORM)
    check(place)
    assert pack(place, tmp_path / "two", FORM).images == 23
    with pytest.raises(UsageError, match="begun from another source or with other options"):
        pack(place, tmp_path / "one", FORM)


def test_folders_of_others_are_left_alone(source: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"has something in it, notes.txt"):
        pack(source, tmp_path, FORM)
    assert [one.name for one in tmp_path.iterdir() if one.name != ".pack.lock"] == ["notes.txt"]
    with pytest.raises(UsageError, match="with other options"):
        pack(source, packed, Packing(short=63, per_shard=7))
    with pytest.raises(UsageError, match="this is in the source"):
        pack(packed, packed / "inside", FORM)


def test_small_pictures_stay_and_odd_ones_become_jpeg() -> None:
    small = jpeg(part(0, 20, 60), quality=33)
    assert smaller(small, FORM) == small
    for odd in (png(part(1, 20, 60)), jpeg(part(2, 20, 60, "CMYK")), png(part(3, 100, 200))):
        made = Image.open(io.BytesIO(smaller(odd, FORM)))
        assert made.format == "JPEG"
        assert made.mode == "RGB"
        assert min(made.size) == min(64, *Image.open(io.BytesIO(odd)).size)


@pytest.mark.parametrize("form", [{"short": 0}, {"quality": 101}, {"per_shard": 0}])
def test_forms_that_cannot_be_are_refused(form: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Packing(**form)


def test_every_state_that_a_crash_can_leave_packs_to_the_same_bytes(tmp_path: Path) -> None:
    """As for checkpoints: any subset of what was not flushed may be lost; the same command makes all of it whole."""
    source = archive(tmp_path / "train.tar", dict(sorted(files().items())[:4]))
    form = Packing(short=16, per_shard=2)
    whole = tree(pack(source, tmp_path / "whole", form).folder)
    root = tmp_path / "root"
    root.mkdir()
    with recording(root) as recorder:
        pack(source, root / "to", form)
    found = 0
    for number, (_, state) in enumerate(states(recorder)):
        place = tmp_path / f"state-{number}"
        rebuild(state, place)
        to = place / "to"
        if (to / MANIFEST).is_file():  # it says that all is there: then it is
            assert {name: digest for name, digest in tree(to).items() if name in whole} == whole
            assert len(Images(to, CentreCrop(size=8))) == 4
        pack(source, to, form)
        assert tree(to) == whole
        shutil.rmtree(place)
        found += 1
    assert found > 20
