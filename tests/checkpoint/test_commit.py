"""A folder is committed whole, or it is not there."""

from __future__ import annotations

import json

import pytest

from grappe.checkpoint.commit import committed, read_json, verify, write_json
from grappe.errors import RunError


def made(folder, content: bytes = b"weights") -> None:
    with committed(folder) as beside:
        (beside / "tensors").write_bytes(content)
        assert not folder.exists(), "it must not be visible before it is whole"


def test_a_committed_folder_verifies(tmp_path) -> None:
    made(tmp_path / "step-000001")
    assert verify(tmp_path / "step-000001") is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]


def test_an_error_while_writing_leaves_nothing(tmp_path) -> None:
    with pytest.raises(OSError, match="disk full"), committed(tmp_path / "step-000001") as beside:
        (beside / "tensors").write_bytes(b"half")
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("position", [0, 3, -1])
def test_a_flipped_bit_is_noticed(tmp_path, position: int) -> None:
    folder = tmp_path / "step-000001"
    made(folder)
    content = bytearray((folder / "tensors").read_bytes())
    content[position] ^= 1
    (folder / "tensors").write_bytes(content)
    assert "not what was saved" in (verify(folder) or "")


def test_a_truncated_or_missing_file_is_noticed(tmp_path) -> None:
    folder = tmp_path / "step-000001"
    made(folder)
    (folder / "tensors").write_bytes(b"wei")
    assert verify(folder)
    (folder / "tensors").unlink()
    assert "cannot be read" in (verify(folder) or "")


@pytest.mark.parametrize(
    "manifest", ["", "[]", '{"files": 3}', '{"files": {"../../etc/passwd": {}}}', '{"files": {"x": null}}']
)
def test_a_manifest_that_lies_is_noticed(tmp_path, manifest: str) -> None:
    folder = tmp_path / "step-000001"
    made(folder)
    (folder / "manifest.json").write_text(manifest)
    assert verify(folder)


def test_json_is_replaced_in_one_step(tmp_path) -> None:
    file = tmp_path / "run.json"
    write_json(file, {"a": 1})
    write_json(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    for content in ("[1]", "{", "[" * 100_000):
        file.write_text(content)
        with pytest.raises(RunError):
            read_json(file)
