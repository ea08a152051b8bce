"""Weights from files that grappe did not write: read, never run."""

import json
import pickle
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from grappe.checkpoint import initial
from grappe.checkpoint.foreign_training import foreign_weights, match
from grappe.checkpoint.initial import LEAST_SECONDS, take_over
from grappe.checkpoint.tensor_file import Piece, write
from grappe.errors import DataError, RunError, UsageError

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
        under("_fsdp_wrapped_module."),
        {f"module.{name}".replace("0.", "0._checkpoint_wrapped_module."): TENSORS[name] for name in TENSORS},
    ],
)
def test_what_others_save(tmp_path, content: dict, suffix: str) -> None:
    torch.save(content, tmp_path / f"a{suffix}")
    weights = foreign_weights(tmp_path / f"a{suffix}")
    places = match(model(), weights).places
    assert {place.name for place in places} == set(TENSORS)
    for place in places:
        assert torch.equal(weights.read(place.sources[0]), TENSORS[place.name])


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
        ({**TENSORS, "epoch": 3}, "only dict, whose 'epoch' is no tensor: save the weights alone"),
        ({"g": TENSORS, "g_ema": TENSORS, "step": 3}, r"several parts \(g, g_ema\): save .*weights_only=True\)\['g'\]"),
    ],
)
def test_what_is_no_state_dict_is_said(tmp_path, content: object, words: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(RunError, match=words):
        foreign_weights(tmp_path / "a.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"<html>", b"\x80", b"PK\x03\x04", b"\xff" * 64, bytes(64), b"{}"])
def test_what_is_damaged_is_said(tmp_path, suffix: str, content: bytes) -> None:
    (tmp_path / f"a{suffix}").write_bytes(content)
    with pytest.raises(RunError, match="a" + suffix):
        foreign_weights(tmp_path / f"a{suffix}")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, suffix: str) -> None:
    (tmp_path / f"a{suffix}").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match="a pointer of Git LFS, and not the file: fetch it by git lfs pull"):
        foreign_weights(tmp_path / f"a{suffix}")


def test_buffers_that_a_file_lacks_are_said(tmp_path) -> None:
    source = nn.BatchNorm1d(2)
    torch.save(dict(source.named_parameters()), tmp_path / "a.pt")
    note = take_over(nn.BatchNorm1d(2), tmp_path / "a.pt")
    assert note.endswith("a.pt: it lacks the buffers running_mean, running_var, which keep their initial values")
    torch.save({name: value for name, value in source.state_dict().items() if "num" not in name}, tmp_path / "a.pt")
    assert not take_over(nn.BatchNorm1d(2), tmp_path / "a.pt")


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
    with pytest.raises(RunError, match=r"a \.safetensors file, or what torch\.save wrote"):
        foreign_weights(tmp_path / "a.onnx")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2))


def raw(*opcodes: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(b"\x80\x02" + b"".join(opcodes) + b".")  # type: ignore[return-value]


def saved(content: object) -> Callable[[Path], None]:
    return lambda file: torch.save(content, file)


def swapped(value: torch.Tensor) -> Callable[[Path], None]:
    return saved({**TENSORS, "0.bias": value})


def hash_bomb() -> Callable[[Path], None]:
    """A key of tuples in tuples, whose hash takes 2 ** 60 steps."""
    nested = [b")q\x00"] + [b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60)]
    return raw(*nested, b"}h\x3cNs")


def bytes_of(count: int) -> Callable[[Path], None]:
    """bytearray(count), which torch lets a file call."""
    return raw(b"c__builtin__\nbytearray\n", b"\x8a\x08" + count.to_bytes(8, "little"), b"\x85R")


def piece(file: Path) -> None:
    weight = Piece("0.weight", TENSORS["0.weight"][:1], (2, 3), (0, 0))
    write(file, [weight, Piece("0.bias", torch.ones(2), (2,), (0,))])


def long_header(file: Path) -> None:
    header = json.dumps({"__metadata__": {"a": "x" * (1 << 26)}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


HOSTILE = {
    "4.5 GB of bytes.pt": bytes_of(4_500_000_000),
    "too many bytes.pt": bytes_of(1 << 62),
    "a key that takes for ever to hash.pt": hash_bomb(),
    "nested.pt": swapped(torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])),
    "sparse.pt": swapped(torch.ones(2).to_sparse()),
    "csr.pt": swapped(torch.ones(2, 2).to_sparse_csr()),
    "quantized.pt": swapped(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
    "meta.pt": swapped(torch.ones(2, device="meta")),
    "complex.pt": swapped(torch.ones(2, dtype=torch.complex64)),
    "whole numbers.pt": swapped(torch.ones(2, dtype=torch.int8)),
    "truth.pt": swapped(torch.ones(2, dtype=torch.bool)),
    "endless.pt": swapped(torch.ones(1).expand(1 << 40)),
    "another shape.pt": swapped(torch.ones(2, 1)),
    "a scalar.pt": swapped(torch.tensor(1.0)),
    "left over.pt": saved({**TENSORS, "\x1b]0;owned\x07" * 99: torch.ones(1)}),
    "missing.pt": saved({"0.bias": torch.ones(2)}),
    "ordered.pt": saved(OrderedDict({1: torch.ones(2)})),
    "a piece.safetensors": piece,
    "a long header.safetensors": long_header,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_weights_are_refused_soon(tmp_path, case: str, monkeypatch) -> None:
    file = tmp_path / case
    HOSTILE[case](file)
    mine = model()
    if "for ever" in case:  # all of its seconds are computed
        monkeypatch.setattr(initial, "LEAST_SECONDS", 1)
    used = time.process_time()
    with pytest.raises((RunError, UsageError)) as refusal:
        take_over(mine, file)
    assert time.process_time() - used < LEAST_SECONDS
    words = str(refusal.value)
    assert words.startswith(f"--from {file}: ") or str(file) in words
    assert len(words) < 1000 + 2 * len(str(file))
    assert "\n" not in words


@pytest.mark.parametrize("new", [False, True])
def test_memory_is_refused_where_it_is_not_the_files_either(tmp_path, new, monkeypatch):
    """In a large file the limit of the address space is large, too: what is really taken is looked at."""
    load = torch.load

    def held(*arguments: Any, **keywords: Any) -> Any:
        found = load(*arguments, **keywords)
        time.sleep(1)  # on a busy machine it would be over before it is looked at
        return found

    monkeypatch.setattr(torch, "load", held)
    content = {**TENSORS, "x": torch.zeros(1 << 25)}  # 128 MB
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(RunError, match="Left over: x" if new else "more than 67 MB of memory|more memory"):
        take_over(model(), tmp_path / "a.pt")


@pytest.mark.parametrize("kind", ["new.pt", "old.pt", "a.safetensors"])
def test_good_weights_are_taken_over(tmp_path, kind: str) -> None:
    if kind.endswith(".safetensors"):
        safetensors.torch.save_file(TENSORS, tmp_path / kind)
    else:
        torch.save(TENSORS, tmp_path / kind, _use_new_zipfile_serialization=kind == "new.pt")
    mine = model()
    take_over(mine, tmp_path / kind)
    assert all(torch.equal(TENSORS[name], tensor) for name, tensor in mine.named_parameters())


def test_other_precisions_and_odd_models_are_taken_over(tmp_path) -> None:
    """Half precision, tied weights, an empty tensor, a buffer of whole numbers, a tensor that is a view."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(4, 3).t())
            self.b = self.a
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.images = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)

    there, mine = Odd(), Odd()
    with torch.no_grad():
        for tensor in there.parameters():
            tensor.normal_()
    there.count.fill_(7)  # type: ignore[operator]
    state = {name: one.bfloat16() if one.is_floating_point() else one for name, one in there.state_dict().items()}
    del state["b"]
    torch.save(state, tmp_path / "a.pt")
    take_over(mine, tmp_path / "a.pt")
    for name, tensor in state.items():
        assert torch.equal(mine.state_dict()[name].to(tensor.dtype), tensor)
    assert mine.a is mine.b
