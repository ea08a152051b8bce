"""A folder is committed whole, or it is not there."""

from __future__ import annotations

import json
import shutil

import pytest

from grappe.checkpoint.commit import OLDER, Origin, commit, json_hash, read_json, verify, write_json, write_new
from grappe.errors import RunError
from tests.faults.trace import left, rebuild, recording, unsynced

ORIGIN = Origin(step=1, run="ours", samples=64)


def made(folder, content: bytes = b"weights") -> None:
    beside = folder.with_name(f".{folder.name}.0")
    beside.mkdir()
    files = {"tensors": write_new(beside / "tensors", content)}
    commit(beside, folder, files, ORIGIN)


def test_a_committed_folder_verifies(tmp_path) -> None:
    made(tmp_path / "step-000001")
    assert verify(tmp_path / "step-000001") is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]


def test_a_power_cut_after_the_commit_leaves_all_of_it(tmp_path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    with recording(checkpoints) as recorder:
        made(checkpoints / "step-000001")
    lost = unsynced(recorder.operations)
    kept = [operation for number, operation in enumerate(recorder.operations) if number not in lost]
    rebuild(left(recorder, kept), tmp_path / "after")
    assert verify(tmp_path / "after" / "step-000001") is None
    assert (tmp_path / "after" / "step-000001" / "tensors").read_bytes() == b"weights"


def test_the_same_step_again_replaces_only_what_is_damaged(tmp_path) -> None:
    folder = tmp_path / "step-000001"
    made(folder, b"first")
    made(folder, b"again")
    assert (folder / "tensors").read_bytes() == b"first"
    (folder / "tensors").write_bytes(b"fi")
    made(folder, b"again")
    assert (folder / "tensors").read_bytes() == b"again"
    assert verify(folder) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("position", [0, 3, -1])
def test_a_flipped_bit_is_noticed(tmp_path, position: int) -> None:
    folder = tmp_path / "step-000001"
    made(folder)
    content = bytearray((folder / "tensors").read_bytes())
    content[position] ^= 1
    (folder / "tensors").write_bytes(content)
    assert "differs from what was saved" in (verify(folder) or "")


def test_a_truncated_or_missing_file_is_noticed(tmp_path) -> None:
    folder = tmp_path / "step-000001"
    made(folder)
    (folder / "tensors").write_bytes(b"wei")
    assert verify(folder)
    (folder / "tensors").unlink()
    assert "not a file in it" in (verify(folder) or "")


@pytest.mark.parametrize(
    "manifest", ["", "[]", '{"files": 3}', '{"files": {"../../etc/passwd": {}}}', '{"files": {"x": null}}']
)
def test_a_manifest_that_lies_is_noticed(tmp_path, manifest: str) -> None:
    folder = tmp_path / "step-000001"
    made(folder)
    (folder / "manifest.json").write_text(manifest)
    assert verify(folder)


def test_a_name_turned_into_another_does_not_hide_a_file(tmp_path) -> None:
    folder, beside = tmp_path / "step-000001", tmp_path / ".step-000001.0"
    beside.mkdir()
    commit(beside, folder, {name: write_new(beside / name, name.encode()) for name in ("rank-0", "rank-1")}, ORIGIN)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace("rank-0", "rank-1"))  # one bit; the later entry wins
    assert "manifest.json differs from what was saved" in (verify(folder) or "")


def test_a_link_is_no_file_of_it(tmp_path) -> None:
    folder = tmp_path / "step-000001"
    made(folder)
    (folder / "tensors").rename(tmp_path / "elsewhere")
    (folder / "tensors").symlink_to(tmp_path / "elsewhere")
    assert "not a file in it" in (verify(folder) or "")


@pytest.mark.parametrize("act", [shutil.copytree, shutil.move])
def test_under_another_name_it_does_not_verify(tmp_path, act) -> None:
    made(tmp_path / "step-000001")
    act(tmp_path / "step-000001", tmp_path / "step-000090")
    assert verify(tmp_path / "step-000090") == "it is the checkpoint of step 1, in a folder of another name"


def test_it_is_of_one_run(tmp_path) -> None:
    made(tmp_path / "step-000001")
    assert verify(tmp_path / "step-000001", "ours") is None
    assert verify(tmp_path / "step-000001", "theirs") == "it is a checkpoint of another run"


@pytest.mark.parametrize("key", ["step", "run", "samples"])
def test_what_the_manifest_says_of_its_place_is_hashed(tmp_path, key: str) -> None:
    made(tmp_path / "step-000001")
    manifest = json.loads((tmp_path / "step-000001/manifest.json").read_text())
    (tmp_path / "step-000001/manifest.json").write_text(json.dumps({**manifest, key: 90}))
    assert verify(tmp_path / "step-000001") == "manifest.json differs from what was saved"
    del manifest[key]
    (tmp_path / "step-000001/manifest.json").write_text(json.dumps(manifest))
    assert verify(tmp_path / "step-000001") == "manifest.json differs from what was saved"


def test_an_older_grappes_is_told_apart(tmp_path) -> None:
    made(tmp_path / "step-000001")
    manifest = json.loads((tmp_path / "step-000001/manifest.json").read_text())
    old = {"files": manifest["files"], "xxh3_128": json_hash(manifest["files"])}
    (tmp_path / "step-000001/manifest.json").write_text(json.dumps(old))
    assert verify(tmp_path / "step-000001") == OLDER


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
