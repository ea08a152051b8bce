"""A folder is committed whole, or it is not there."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

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


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def link(file: Path) -> None:
    file.symlink_to(file.rename(file.parents[1] / "elsewhere"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *((functools.partial(flip, position=position), "differs from what was saved") for position in (0, 3, -1)),
        (lambda file: file.write_bytes(b"wei"), "differs from what was saved"),
        (lambda file: file.unlink(), "not a file in it"),
        (link, "not a file in it"),
    ],
)
def test_damage_to_a_file_is_noticed(tmp_path, damage: Callable[[Path], object], words: str) -> None:
    folder = tmp_path / "step-000001"
    made(folder)
    damage(folder / "tensors")
    assert words in (verify(folder) or "")


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
