"""Staging: one copy a node, whole or absent, at the cost of one, and with its index."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from grappe.data import CentreCrop, Images, stage
from grappe.data.staging import copied
from grappe.errors import DataError, GrappeError, UsageError
from tests.data.images.pictures import archive, files, folder, shards
from tests.patience import PATIENCE_SECONDS


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of photos."""
    return folder(tmp_path / "here" / "photos", files())


def contents(place: Path) -> dict[str, bytes]:
    return {str(one.relative_to(place)): one.read_bytes() for one in sorted(place.rglob("*")) if one.is_file()}


@pytest.mark.parametrize("make", [folder, shards])
def test_a_folder_is_copied_once_with_its_index(tmp_path: Path, make, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "here" / "photos"
    source.parent.mkdir()
    make(source, files())
    data = Images(source, CentreCrop(size=8))
    done = copied(source, tmp_path / "node")
    assert contents(done.place) == contents(source)
    assert done.copied == done.files
    again = copied(source, tmp_path / "node")
    assert again.copied == 0
    assert again.place == stage(source, tmp_path / "node") == tmp_path / "node" / "photos"
    capsys.readouterr()
    staged = Images(again.place, CentreCrop(size=8))
    assert capsys.readouterr().err == ""  # no headers are read again
    assert staged.targets().tolist() == data.targets().tolist()
    assert (staged[3][0] == data[3][0]).all()


def test_what_has_changed_is_copied_and_what_is_gone_is_removed(tmp_path: Path, source: Path) -> None:
    copied(source, tmp_path / "node")
    first, second, *_ = sorted(one for one in source.rglob("*") if one.is_file())
    first.unlink()
    second.write_bytes(b"another")
    done = copied(source, tmp_path / "node")
    assert done.copied == 1
    assert contents(done.place) == contents(source)


def test_a_file_that_has_changed_and_kept_its_size_is_copied_again(tmp_path: Path) -> None:
    source = tmp_path / "numbers.bin"
    source.write_bytes(b"first")
    copied(source, tmp_path / "node")
    source.write_bytes(b"again")
    os.utime(source, (1e9, 1e9))
    done = copied(source, tmp_path / "node")
    assert (done.copied, done.place.read_bytes()) == (1, b"again")


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    source = tmp_path / "train.tar"
    source.write_bytes(b"new")
    place = tmp_path / "node"
    place.mkdir()
    (place / "train.tar").write_bytes(b"mine")
    with pytest.raises(UsageError, match="was not staged by grappe"):
        stage(source, place)
    assert (place / "train.tar").read_bytes() == b"mine"
    with pytest.raises(UsageError, match="where the source is"):
        stage(source, tmp_path)
    with pytest.raises(DataError, match="no such file"):
        stage(tmp_path / "nothing", place)
    photos = tmp_path / "photos"
    photos.mkdir()
    os.mkfifo(photos / "pipe")
    with pytest.raises(DataError, match="is not a file"):
        stage(photos, place)


def test_a_full_disk_is_said_before_and_while_copying(tmp_path: Path, source: Path) -> None:
    small = patch("shutil.disk_usage", return_value=type("", (), {"free": 10}))
    with small, pytest.raises(DataError, match="does not fit"):
        stage(source, tmp_path / "node")
    real, calls = os.utime, []

    def full(*of, **more) -> None:
        calls.append(of)
        if len(calls) == 3:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(*of, **more)

    with patch("os.utime", full), pytest.raises(DataError, match=r"quota exceeded\. Complete copies stay"):
        stage(source, tmp_path / "node")
    assert len(contents(tmp_path / "node" / "photos")) == 2
    done = copied(source, tmp_path / "node")
    assert done.copied == done.files - 2
    assert contents(done.place) == contents(source)


def test_a_copy_that_reads_otherwise_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "train.tar"
    source.write_bytes(b"content")
    with patch("grappe.data.staging._hash", return_value="another"), pytest.raises(DataError, match="reads otherwise"):
        stage(source, tmp_path / "node")
    assert not (tmp_path / "node" / "train.tar").exists()


SCRIPT = """
import sys, pathlib
from grappe.data.staging import copied
print(copied(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])).copied)
"""


def test_processes_of_a_node_make_one_copy(tmp_path: Path) -> None:
    source = tmp_path / "train.tar"
    archive(source, files())
    words = [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "node")]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = sorted(one.communicate(timeout=PATIENCE_SECONDS)[0].strip() for one in started)
    assert found == ["0", "0", "1"]
    assert (tmp_path / "node" / "train.tar").read_bytes() == source.read_bytes()


def test_a_killed_copy_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "here" / "photos"
    source.mkdir(parents=True)
    for number in range(300):
        (source / f"{number:03d}").write_bytes(b"%d" % number * 1000)
    node = tmp_path / "node"
    words = [sys.executable, "-c", SCRIPT, str(source), str(node)]
    started = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + PATIENCE_SECONDS
    while started.poll() is None and len(list(node.glob("photos/*"))) < 5 and time.monotonic() < until:
        time.sleep(0.001)
    started.send_signal(signal.SIGKILL)
    started.communicate()
    done = copied(source, node)
    assert contents(done.place) == contents(source)


def test_a_folder_that_cannot_be_read_is_an_error_and_removes_nothing(tmp_path: Path, source: Path) -> None:
    whole = contents(copied(source, tmp_path / "node").place)
    bad, real = sorted(one for one in source.iterdir() if one.is_dir())[0], os.scandir

    def broken(path):
        if Path(path) == bad:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    with patch("os.scandir", broken), pytest.raises(DataError, match=rf"{bad.name}: Input/output error"):
        stage(source, tmp_path / "node")
    assert contents(tmp_path / "node" / "photos") == whole


def test_links_are_not_followed(tmp_path: Path, source: Path) -> None:
    other = tmp_path / "other"
    place = copied(source, tmp_path / "node").place
    place.rename(other)
    place.symlink_to(other)
    before = contents(other)
    next(one for one in source.rglob("*") if one.is_file()).unlink()
    with pytest.raises(UsageError, match="is a link"):
        stage(source, tmp_path / "node")
    assert contents(other) == before
    mine = tmp_path / "mine"
    mine.write_text("mine")
    lock = tmp_path / "node" / ".photos.stage.lock"
    lock.unlink()
    lock.symlink_to(mine)
    with pytest.raises(GrappeError):
        stage(source, tmp_path / "node")
    assert mine.read_text() == "mine"


def test_a_killed_copy_of_a_single_file_leaves_nothing_behind(tmp_path: Path) -> None:
    source, node = tmp_path / "here" / "data.tar", tmp_path / "node"
    source.parent.mkdir()
    source.write_bytes(b"content")
    node.mkdir()
    (node / ".data.tar.0123abcd.staging").write_bytes(b"half")
    (node / ".other.tar.0123abcd.staging").write_bytes(b"of another")
    assert copied(source, node).copied == 1
    assert {one.name for one in node.iterdir() if one.name.endswith(".staging")} == {".other.tar.0123abcd.staging"}


def test_the_sources_own_files_may_be_called_so(tmp_path: Path, source: Path) -> None:
    (source / ".mine.staging").write_text("mine")
    (source / "notes.staging").write_text("mine")
    assert copied(source, tmp_path / "node").copied == len(contents(source))
    assert copied(source, tmp_path / "node").copied == 0


def test_a_whole_copy_on_a_full_disk_is_taken(tmp_path: Path, source: Path) -> None:
    copied(source, tmp_path / "node")
    with patch("shutil.disk_usage", return_value=type("", (), {"free": 0})):
        assert copied(source, tmp_path / "node").copied == 0
