"""Headers are walked as Python's tarfile reads them; what is no plain archive gets one message."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grappe.data.shards import tar as tar_headers
from grappe.data.shards.tar import Member, archive_in, members
from grappe.errors import DataError
from tests.data.images.pictures import tar


def walked(file: Path) -> list[Member]:
    return list(members(archive_in(file)))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(tmp_path: Path, form: int) -> None:
    names = ["a.jpg", "b/" + "c" * 90 + ".jpg", "d/" * 60 + "e.jpg", "é.jpg"]
    if form != tarfile.USTAR_FORMAT:
        names.append("f" * 300 + ".jpg")
    file = tmp_path / "a.tar"
    file.write_bytes(tar(((name, os.urandom(700 * place)) for place, name in enumerate(names)), form))
    found = walked(file)
    content = file.read_bytes()
    with tarfile.open(file) as archive:
        told = [(one.name.encode(), one.offset_data, one.size) for one in archive]
    assert [(one.name, one.offset, one.size) for one in found] == told
    assert all(one.head == content[one.offset : one.offset + min(one.size, 512)] for one in found)


def test_an_archive_of_gnus_tar_and_a_size_in_base_256(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / ("n" * 150)).write_bytes(b"x" * 1000)
    subprocess.run(["tar", "cf", "a.tar", "in"], cwd=tmp_path, check=True)
    assert [(len(one.name), one.size) for one in walked(tmp_path / "a.tar")] == [(153, 1000)]
    told = tarfile.TarInfo("big.jpg")
    told.size = 1 << 34  # more than eleven octal digits
    header = told.tobuf(tarfile.GNU_FORMAT)
    with (tmp_path / "big.tar").open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + told.size + 1024)  # a hole, on no disk
    assert [one.size for one in walked(tmp_path / "big.tar")] == [1 << 34]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_windows_of_any_size_have_the_same_members(tmp_path, form, monkeypatch):
    """Headers stand at each place of a window, and across two."""
    sizes = [0, 1, 511, 512, 513, 3000, 10_000] * 20
    (tmp_path / "a.tar").write_bytes(tar([(f"a/{n:06d}.jpg", os.urandom(size)) for n, size in enumerate(sizes)], form))
    expected = walked(tmp_path / "a.tar")
    assert [one.size for one in expected] == sizes
    for window in (1 << 10, 1 << 11, 1 << 20):
        monkeypatch.setattr(tar_headers, "_WINDOW", window)
        assert walked(tmp_path / "a.tar") == expected


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("../etc/a.jpg", tarfile.REGTYPE, "'../etc/a.jpg', which is not a path inside a folder"),
        ("/etc/a.jpg", tarfile.REGTYPE, "not a path inside"),
        ("a/../../b.jpg", tarfile.REGTYPE, "not a path inside"),
        ("a\x1b[2J.jpg\n", tarfile.REGTYPE, r"a\\x1b\[2J.jpg\\n', which"),
        ("a.jpg", tarfile.SYMTYPE, "'a.jpg' is a symbolic link"),
        ("a.jpg", tarfile.LNKTYPE, "'a.jpg' is a hard link"),
        ("a.jpg", tarfile.GNUTYPE_SPARSE, "'a.jpg' is a sparse file"),
        ("a.jpg", tarfile.CHRTYPE, "a character device"),
        ("a.jpg", b"Z", "unknown type 'Z'"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, name: str, kind: bytes, words: str) -> None:
    told = tarfile.TarInfo(name)
    told.type, told.linkname = kind, "/etc/passwd"
    (tmp_path / "a.tar").write_bytes(told.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    with pytest.raises(DataError, match=words):
        walked(tmp_path / "a.tar")


def test_pax_can_say_sparse_and_must_be_whole(tmp_path: Path) -> None:
    def packed(**headers: str) -> None:
        told = tarfile.TarInfo("a.jpg")
        told.pax_headers = {name.replace("_", "."): value for name, value in headers.items()}
        (tmp_path / "a.tar").write_bytes(told.tobuf(tarfile.PAX_FORMAT) + bytes(1024))

    packed(GNU_sparse_major="1", GNU_sparse_minor="0")
    with pytest.raises(DataError, match="is a sparse file"):
        walked(tmp_path / "a.tar")
    packed(comment="x")
    assert [one.name for one in walked(tmp_path / "a.tar")] == [b"a.jpg"]
    content = (tmp_path / "a.tar").read_bytes().replace(b"comment=x", b"comment x")
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataError, match="a damaged pax header"):
        walked(tmp_path / "a.tar")


def test_an_archive_that_is_cut_off_says_where(tmp_path: Path) -> None:
    whole = tar([("a.jpg", b"x" * 600), ("b.jpg", b"y" * 600)])
    file = tmp_path / "a.tar"
    for length, behind in ((0, 0), (300, 0), (1000, 0), (1536, 1), (2000, 1), (3072, 2)):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match=f"cut off after {behind} complete members: fetch it again"):
            walked(file)


def test_other_files_are_no_archive(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    file.write_bytes(b"\x1f\x8b" + os.urandom(5000))
    with pytest.raises(DataError, match="no tar header at its beginning: it is another kind of file, or compressed"):
        walked(file)
    damaged = bytearray(tar([("a.jpg", b"x" * 600), ("b.jpg", b"y" * 600)]))
    damaged[1540] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(DataError, match="a damaged header at byte 1,536"):
        walked(file)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 4095), st.integers(0, 255), st.integers(0, 5000))
def test_damage_is_an_archive_or_a_message(tmp_path_factory, place: int, value: int, length: int) -> None:
    stream = io.BytesIO(tar([("p" * 120 + ".jpg", b"x" * 600), ("b.jpg", b"y" * 600)], tarfile.PAX_FORMAT))
    content = bytearray(stream.getvalue())
    content[place] = value
    file = tmp_path_factory.getbasetemp() / "damaged.tar"
    file.write_bytes(content[: length if length > 4000 else len(content)])
    try:
        found = walked(file)
    except DataError:
        return
    assert all(one.offset + one.size <= len(content) for one in found)
