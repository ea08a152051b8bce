"""grappe data on the command line: what it prints, its exit codes, and one message for what is wrong."""

from pathlib import Path

import pytest

from grappe.errors import DataError
from tests.data.images.pictures import archive, files, folder, jpeg, part, tar
from tests.typed import grappe as run


def test_the_commands_in_the_order_of_the_guide(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {**files(), "n01440764/bad.JPEG": b"", "n01440764/ev\x1b[2Jil.JPEG": b"", "n01440764/readme": b""}
    folder(Path("train"), found)
    assert run("data", "index", "train") == 0
    said = capsys.readouterr().out
    assert "26 of 3 classes" in said
    assert "without an ending 1 (n01440764/readme)" in said
    assert run("data", "check", "train") == 0
    said = capsys.readouterr().out
    assert "bad.JPEG: the file is empty" in said
    assert "\x1b" not in said
    assert "train.quarantine.txt: datasets leave these out" in said
    assert run("data", "pack", "train", "--out", "packed", "--short", "64", "--quality", "80") == 0
    said = capsys.readouterr()
    assert "packed: 1 shard" in said.out and "1 shards" not in said.out
    assert "24 of 26 images, 2 in quarantine" in said.err
    assert run("data", "index", "packed") == 0
    assert "24 of 3 classes" in capsys.readouterr().out
    assert run("data", "index", "train", "--again") == 0
    assert "in quarantine  2, left out" in capsys.readouterr().out


def test_an_archive_with_a_file_of_labels(tmp_path: Path, capsys) -> None:
    (tmp_path / "val.tar").write_bytes(tar([("b.JPEG", jpeg(part(0))), ("a.JPEG", jpeg(part(1)))]))
    (tmp_path / "labels.txt").write_text("2\n1\n")
    (tmp_path / "map.txt").write_text("n01 1 x\nn02 2 y\n")
    words = ("--labels", str(tmp_path / "labels.txt"), "--numbering", str(tmp_path / "map.txt"))
    for command in ("index", "check"):
        assert run("data", command, str(tmp_path / "val.tar"), *words) == 0
    assert run("data", "pack", str(tmp_path / "val.tar"), "--out", str(tmp_path / "packed"), *words) == 0
    assert "2, short side at most 256" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["index", "check"])
def test_what_is_wrong_is_one_message(tmp_path: Path, command: str) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        run("data", command, str(tmp_path / "none"))
    whole = archive(tmp_path / "train.tar", files()).read_bytes()
    (tmp_path / "train.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut off after . complete members: fetch it again"):
        run("data", command, str(tmp_path / "train.tar"))
