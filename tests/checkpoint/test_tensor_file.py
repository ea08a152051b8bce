"""Tensors in safetensors' format: written by us, read by anyone; put together from pieces."""

import itertools
import json
import resource
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grappe.checkpoint.commit import fingerprint
from grappe.checkpoint.tensor_file import NAMES, Piece, TensorFiles, write
from grappe.errors import OutOfMemory, RunError
from grappe.launch.fork import run_in_fork
from grappe.profiling.memory import data_size


def whole(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def bits(tensor: torch.Tensor) -> list:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def of_every_dtype() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for dtype in NAMES:
        size = torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5, size), generator=generator)
        tensors[str(dtype)] = raw.to(torch.uint8).view(dtype).view(3, 5)
    return tensors


@pytest.mark.parametrize(
    "tensors",
    [
        of_every_dtype(),
        {"scalar": torch.tensor(2.5), "flag": torch.tensor(True), "one": torch.ones(1)},
        {"empty": torch.empty(0), "flat": torch.empty(3, 0, 2), "after": torch.arange(3)},
        {"last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)},
        {"turned": torch.arange(12.0).view(3, 4).t(), "every second": torch.arange(9)[::2]},
        {"spread": torch.ones(1).expand(4, 3), 'a "quoted" näme.\n': torch.zeros(2)},
        {},
    ],
    ids=["dtypes", "0-d", "empty", "channels_last", "strided", "names", "none"],
)
def test_round_trip_here_and_in_the_library(tmp_path, tensors: dict[str, torch.Tensor]) -> None:
    told = write(tmp_path / "a.safetensors", [whole(name, one) for name, one in tensors.items()])
    assert told == fingerprint(tmp_path / "a.safetensors")
    ours = TensorFiles([tmp_path / "a.safetensors"])
    theirs = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(ours) == set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        assert ours.shape(name) == tuple(tensor.shape)
        assert alike(ours.read(name), tensor)
        assert alike(theirs[name], tensor)


def test_what_safetensors_cannot_hold_is_said(tmp_path) -> None:
    with pytest.raises(RunError, match=r"'wide' is torch\.complex128"):
        write(tmp_path / "a.safetensors", [whole("wide", torch.zeros(2, dtype=torch.complex128))])


def cuts(size: int) -> st.SearchStrategy[list[int]]:
    """Chooses the cuts of a dimension: 0, some positions between, its size."""
    return st.sets(st.integers(0, size), max_size=3).map(lambda some: sorted({0, size, *some}))


@st.composite
def split_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[Piece]]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    tensor = torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else torch.randn(shape).mul(9).to(dtype)
    sides = [list(itertools.pairwise(draw(cuts(size)))) for size in shape]
    pieces = []
    for box in itertools.product(*sides):
        part = tensor[tuple(slice(start, stop) for start, stop in box)]
        pieces.append(Piece("t", part, tuple(shape), tuple(start for start, _ in box)))
    return tensor, draw(st.permutations(pieces))


def written(folder: Path, pieces: list[Piece]) -> list[Path]:
    files = []
    for index, piece in enumerate(pieces):
        file = folder / f"{index}.safetensors"
        file.unlink(missing_ok=True)
        write(file, [piece])
        files.append(file)
    return files


@settings(max_examples=60, deadline=None)
@given(made=split_tensors(), data=st.data())
def test_pieces_are_put_together(tmp_path_factory, made: tuple[torch.Tensor, list[Piece]], data) -> None:
    tensor, pieces = made
    files = written(tmp_path_factory.mktemp("pieces"), pieces)
    read = TensorFiles(files)
    assert alike(read.read("t"), tensor)
    begin = [data.draw(st.integers(0, size - 1)) for size in tensor.shape]
    shape = [data.draw(st.integers(1, size - at)) for size, at in zip(tensor.shape, begin, strict=True)]
    box = tuple(slice(at, at + size) for at, size in zip(begin, shape, strict=True))
    assert alike(read.read_part("t", shape, begin), tensor[box])
    missing = data.draw(st.integers(0, len(pieces) - 1))
    with pytest.raises((RunError, KeyError)):
        TensorFiles(files[:missing] + files[missing + 1 :]).read("t")


def test_a_piece_that_is_there_twice_does_not_hide_one_that_is_missing(tmp_path) -> None:
    piece = Piece("t", torch.ones(2), (4,), (0,))
    with pytest.raises(RunError, match="there twice"):
        TensorFiles(written(tmp_path, [piece, piece]))


@pytest.mark.parametrize(("shape", "offsets"), [((4,), [(0,), (1,)]), ((4, 4), [(0, 0), (0, 2), (2, 0), (2, 1)])])
def test_pieces_that_overlap_do_not_hide_a_gap(tmp_path, shape: tuple, offsets: list[tuple]) -> None:
    """Of the right size together: what is read would have numbers that nobody wrote."""
    half = torch.ones([2] * len(shape))
    files = written(tmp_path, [Piece("t", half, shape, offset) for offset in offsets])
    with pytest.raises(RunError, match=rf"^{files[0]} and {files[1]}.*: the pieces of 't' overlap"):
        TensorFiles(files).read("t")


@pytest.mark.parametrize(
    ("local", "shape", "offset"),
    [(2, (4,), (3,)), (2, (4,), (-1,)), (2, (4, 4), (0, 0)), (2, (1,), (0,)), (2, (4,), (0, 0))],
)
def test_pieces_that_do_not_fit_are_refused(tmp_path, local: int, shape: tuple, offset: tuple) -> None:
    write(tmp_path / "a.safetensors", [Piece("t", torch.ones(local), shape, offset)])
    with pytest.raises(RunError, match="do not fit together"):
        TensorFiles([tmp_path / "a.safetensors"])


def test_a_shape_that_lies_is_refused_before_memory_is_asked_for(tmp_path) -> None:
    write(tmp_path / "a.safetensors", [Piece("t", torch.ones(2), (10**15,), (0,))])
    with pytest.raises(RunError, match="not there in full"):
        TensorFiles([tmp_path / "a.safetensors"]).read("t")


@pytest.mark.parametrize("pieces", ["[]", '{"t": 3}', '{"t": {"shape": "x", "offset": null}}', "[" * 100_000, "{"])
def test_pieces_told_of_in_nonsense_are_refused(tmp_path, pieces: str) -> None:
    header = {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"pieces": pieces}}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(RunError):
        TensorFiles([tmp_path / "a.safetensors"])


def test_a_file_that_is_read_does_not_count_as_data(tmp_path) -> None:
    """As RLIMIT_DATA counts it: each process of a training has the checkpoint open that it goes on from."""
    size = 64 << 20
    write(tmp_path / "a.safetensors", [Piece("t", torch.zeros(size, dtype=torch.uint8), (size,), (0,))])
    before = data_size()
    files = TensorFiles([tmp_path / "a.safetensors"])
    assert not files.read_part("t", (9,), (5,)).any()
    assert data_size() - before < size / 4


def test_a_file_for_which_no_address_is_left_is_not_called_unreadable(tmp_path) -> None:
    megabytes = 200
    write(tmp_path / "large", [whole("w", torch.zeros(megabytes << 20, dtype=torch.uint8))])

    def read() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 19), resource.RLIM_INFINITY))
        TensorFiles([tmp_path / "large"])

    with pytest.raises(OutOfMemory, match=r"no memory was left to read .*large: .*--mem"):
        run_in_fork(read)
