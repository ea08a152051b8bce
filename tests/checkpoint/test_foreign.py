"""Weights from files that grappe did not write: read, never run."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from grappe.checkpoint.foreign import foreign_weights
from grappe.errors import RunError

TENSORS = {"0.weight": torch.randn(2, 3), "0.bias": torch.randn(2)}


class Touch:
    """A pickle that makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self):
        return (Path.touch, (self._file,))


def under(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize(
    "content",
    [
        TENSORS,
        under("module."),
        under("module._orig_mod."),
        under("_orig_mod.module."),
        {"state_dict": under("model."), "epoch": 3, "hyper_parameters": {"lr": 0.1}, "callbacks": {}},
        {"model": under("module."), "optimizer": {"state": {}}},
    ],
)
def test_what_others_save(tmp_path, content: dict, suffix: str) -> None:
    torch.save(content, tmp_path / f"a{suffix}")
    weights = foreign_weights(tmp_path / f"a{suffix}")
    assert set(weights) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(weights.read(name), tensor)
        assert weights.shape(name) == tuple(tensor.shape)


def test_the_old_format_and_safetensors(tmp_path) -> None:
    torch.save(TENSORS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(TENSORS, tmp_path / "a.safetensors")
    for name in ("old.pt", "a.safetensors"):
        weights = foreign_weights(tmp_path / name)
        assert all(torch.equal(weights.read(key), tensor) for key, tensor in TENSORS.items())


def test_wrappers_of_a_safetensors_file_are_taken_off(tmp_path) -> None:
    safetensors.torch.save_file(under("module._orig_mod."), tmp_path / "a.safetensors")
    weights = foreign_weights(tmp_path / "a.safetensors")
    assert set(weights) == set(TENSORS)
    assert all(torch.equal(weights.read(key), tensor) for key, tensor in TENSORS.items())


def test_a_prefix_that_only_some_have_stays(tmp_path) -> None:
    torch.save({"model.a": torch.ones(1), "head": torch.ones(1)}, tmp_path / "a.pt")
    assert set(foreign_weights(tmp_path / "a.pt")) == {"model.a", "head"}


@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".bin", ".safetensors"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pickle_with_code_is_refused_and_nothing_runs(tmp_path, suffix: str, wrapped: bool) -> None:
    mark, file = tmp_path / "ran", tmp_path / f"evil{suffix}"
    content = {"state_dict": {**TENSORS, "x": Touch(mark)}} if wrapped else Touch(mark)
    if suffix == ".bin":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file)
    with pytest.raises(RunError, match=r"evil"):
        foreign_weights(file)
    assert not mark.exists()
    with file.open("rb") as stream:  # the bait is live
        if suffix == ".bin":
            pickle.load(stream)
        else:
            torch.load(stream, weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "no state dict in it, only list"),
        ({"epoch": 3}, "no state dict"),
        ({"state_dict": [torch.ones(1)]}, "no state dict"),
        ({0: torch.ones(1)}, "no state dict"),
        (torch.ones(3), "only Tensor"),
    ],
)
def test_what_is_no_state_dict_is_said(tmp_path, content: object, words: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(RunError, match=words):
        foreign_weights(tmp_path / "a.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"\x80", b"PK\x03\x04", b"\xff" * 64, bytes(64), b"{}"])
def test_what_is_damaged_is_said(tmp_path, suffix: str, content: bytes) -> None:
    (tmp_path / f"a{suffix}").write_bytes(content)
    with pytest.raises(RunError, match="a" + suffix):
        foreign_weights(tmp_path / f"a{suffix}")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path) -> None:
    torch.save({"a": torch.zeros(1 << 22)}, tmp_path / "fair.pt")
    with zipfile.ZipFile(tmp_path / "fair.pt") as fair, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for entry in fair.infolist():
            bomb.writestr(entry.filename, fair.read(entry), zipfile.ZIP_DEFLATED, 9)
    assert (tmp_path / "bomb.pt").stat().st_size < (1 << 22) / 16
    with pytest.raises(RunError, match="compressed"):
        foreign_weights(tmp_path / "bomb.pt")


def test_no_such_file_and_no_such_format(tmp_path) -> None:
    with pytest.raises(RunError, match="no such run or file"):
        foreign_weights(tmp_path / "a.pt")
    (tmp_path / "a.onnx").touch()
    with pytest.raises(RunError, match=r"ends in \.safetensors"):
        foreign_weights(tmp_path / "a.onnx")
