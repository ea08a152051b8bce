"""Official files, honest and hostile: what is read is right, what is wrong is said, and nothing is run."""

import gzip
import os
import pickle
import re
import struct
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from grappe.data.formats import cifar10_binary, cifar10_python, idx, locate, missing, mnist
from grappe.errors import DataError


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def python2_batch(images: np.ndarray, labels: list[int], key: bytes = b"data", tail: bytes = b"u.") -> bytes:
    """Makes a pickle like Python 2's cPickle of CIFAR-10: {data: uint8 [N, 3072], labels: list}, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    raw = images.tobytes()
    state = b"(K\x01" + b"J" + struct.pack("<i", len(images)) + b"M\x00\x0c\x86"
    dtype = b"cnumpy\ndtype\nq\x0c" + text(b"u1") + b"K\x00K\x01\x87q\rRq\x0e"
    dtype += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85q\x08"
    array += text(b"b") + b"q\t\x87q\nRq\x0b" + state + dtype
    array += b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}q\x01(" + text(key) + array + text(b"labels") + b"]q\x05" + numbers + tail


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (7, 3072), dtype=np.uint8)


LABELS = [6, 9, 9, 4, 1, 0, 2]


def write(folder: Path, content: bytes, name: str = "data_batch_1") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# IDX


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_is_read_gzipped_or_not(tmp_path, pack):
    array = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    found = idx(write(tmp_path, pack(idx_bytes(array))))
    assert found.dtype == np.uint8 and np.array_equal(found, array)
    with warnings.catch_warnings():  # torch warns of arrays that it may not write to
        warnings.simplefilter("error")
        torch.as_tensor(found)


def huge(*shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(100)


GOOD = idx_bytes(np.ones((20, 3), np.uint8))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD[:-1], "truncated: its header, 20 x 3, asks for 72 bytes, and it has 71"),
        (GOOD + b"x", "trailing bytes"),
        (GOOD[:9], "truncated in its header"),
        (b"", "it should begin with 00 00 08"),
        (b"\x00\x00\x0d\x01" + GOOD, "not 00 00 0d 01"),
        (b"PK\x03\x04" + GOOD, "not an IDX file"),
        (b"\x00\x00\x08\xff" + bytes(2000), "not an IDX file"),
        (huge(2**32 - 1, 2**32 - 1, 2**32 - 1), "truncated"),
        (huge(2**31, 28, 28), "truncated"),
        (huge(0, 2**32 - 1, 2**32 - 1), "has a dimension of 0"),
    ],
)
def test_a_wrong_idx_file_is_refused(tmp_path, content, said, pack):
    with pytest.raises(DataError) as error:
        idx(write(tmp_path, pack(content), "train-images-idx3-ubyte"))
    message = str(error.value)
    if pack is bytes or "trunc" not in said:
        assert said in message
    assert str(tmp_path / "train-images-idx3-ubyte") in message and "Fetch it again" in message


def test_a_damaged_or_truncated_gzip_is_refused(tmp_path):
    content = bytearray(gzip.compress(GOOD * 20))
    with pytest.raises(DataError, match="trailing bytes after its gzip stream"):
        idx(write(tmp_path, gzip.compress(GOOD) + b"more"))
    content[-6] ^= 1
    random = gzip.compress(idx_bytes(np.random.default_rng(0).integers(0, 256, (50, 9), dtype=np.uint8)))
    for damaged in (bytes(content), *(random[:cut] for cut in (5, 20, 30, -9, -4, -1))):
        with pytest.raises(DataError, match="damaged"):
            idx(write(tmp_path, damaged))


def test_a_gzip_of_much_more_than_its_header_says_is_not_unpacked(tmp_path):
    path = write(tmp_path, gzip.compress(idx_bytes(np.ones((1, 28, 28), np.uint8)) + bytes(20_000_000), 1))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="trailing bytes"):
            idx(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("shape", "inner", "words"),
    [
        ((60_001, 28, 28), (28, 28), "60001 x 28 x 28, asks for more than 60,000 samples"),
        ((60_000, 28, 29), (28, 28), "expected images, N x 28 x 28, found 60000 x 28 x 29"),
        ((60_001,), None, "60001, asks for more than 60,000 samples"),
        ((2_000, 1_000, 1_000), None, "asks for more than 60,000 samples"),
    ],
)
def test_a_gzip_that_admits_to_be_too_large_is_not_unpacked(tmp_path, shape, inner, words):
    """The header is true: a gzip file of 2 MB can hold 2 GB."""
    header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
    path = write(tmp_path, gzip.compress(header + bytes(1000), 1))
    with pytest.raises(DataError) as error:
        idx(path, inner, 60_000)
    assert words in str(error.value)


def test_mnist_pairs(tmp_path):
    images = write(tmp_path, idx_bytes(np.full((4, 28, 28), 7, np.uint8)), "images")
    labels = write(tmp_path, idx_bytes(np.array([3, 0, 9, 1], np.uint8)), "labels")
    pixels, classes = mnist(images, labels)
    assert pixels.shape == (4, 1, 28, 28) and pixels.dtype == np.uint8
    assert classes.dtype == np.int64 and classes.tolist() == [3, 0, 9, 1]
    with pytest.raises(DataError, match="expected images, N x 28 x 28, found 4"):
        mnist(labels, labels)
    with pytest.raises(DataError, match="expected a label for each of 4 images, found 4 x 28 x 28"):
        mnist(images, images)
    with pytest.raises(DataError, match="a label is 10"):
        mnist(images, write(tmp_path, idx_bytes(np.array([3, 0, 10, 1], np.uint8)), "ten"))


# CIFAR-10, binary


def test_binary(tmp_path, pixels):
    records = np.concatenate([np.array(LABELS, np.uint8)[:, None], pixels], axis=1)
    one = write(tmp_path, records[:4].tobytes(), "data_batch_1.bin")
    two = write(tmp_path, records[4:].tobytes(), "data_batch_2.bin")
    images, labels = cifar10_binary([one, two])
    assert images.dtype == np.uint8 and np.array_equal(images, pixels.reshape(7, 3, 32, 32))
    assert labels.dtype == np.int64 and labels.tolist() == LABELS
    for wrong in (b"", records.tobytes()[:-1]):
        with pytest.raises(DataError, match=r"data_batch_3.bin.*truncated.*records of 3073"):
            cifar10_binary([one, write(tmp_path, wrong, "data_batch_3.bin")])
    with pytest.raises(DataError, match="a label is 255"):
        cifar10_binary([write(tmp_path, b"\xff" * 3073)])
    with pytest.raises(DataError, match="cannot be read: No such file"):
        cifar10_binary([tmp_path / "none.bin"])


# CIFAR-10, Python


def test_python_as_python_2_wrote_it(tmp_path, pixels):
    content = python2_batch(pixels, LABELS)
    official = pickle.loads(content, encoding="bytes")  # the fixture is what the official page says
    assert np.array_equal(official[b"data"], pixels) and official[b"labels"] == LABELS
    path = write(tmp_path, content)
    images, labels = cifar10_python([path, path])
    assert images.dtype == np.uint8
    assert np.array_equal(images, np.concatenate([pixels, pixels]).reshape(14, 3, 32, 32))
    assert labels.dtype == np.int64 and labels.tolist() == LABELS * 2


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("keys", [("data", "labels"), (b"data", b"labels")])
@pytest.mark.parametrize("order", ["C", "F"])
def test_python_as_python_3_writes_it(tmp_path, pixels, protocol, keys, order):
    content = {keys[0]: np.asarray(pixels, order=order), keys[1]: LABELS, "filenames": ["a.png", "é"]}
    images, labels = cifar10_python([write(tmp_path, pickle.dumps(content, protocol))])
    assert np.array_equal(images, pixels.reshape(7, 3, 32, 32)) and labels.tolist() == LABELS


class Run:
    """Pickled, it is a call of `function`."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("function", [os.system, eval])
def test_code_is_refused_and_does_not_run(tmp_path, pixels, protocol, function):
    marker = tmp_path / "ran"
    command = f"touch {marker}" if function is os.system else f"open({str(marker)!r}, 'w')"
    name = "posix.system" if function is os.system else ("builtins" if protocol > 2 else "__builtin__") + ".eval"
    hostile = Run(function, command)
    for content in (hostile, [hostile], {"data": pixels, "labels": hostile}, {hostile: 1}, {"data": hostile}):
        path = write(tmp_path, pickle.dumps(content, protocol))
        with pytest.raises(DataError) as error:
            cifar10_python([path])
        if protocol in (2, 3, 4):  # the others differ from the official files before they come to the code
            assert f"carries code ({name}): refused, nothing was run" in str(error.value)
    assert not marker.exists()
    pickle.loads(pickle.dumps(hostile, protocol))  # the test itself is sharp
    assert marker.exists()


def test_code_after_an_honest_batch_is_refused(tmp_path, pixels):
    tail = b"U\x01xcposix\nsystem\nU\x02ls\x85Ru."
    with pytest.raises(DataError, match=r"data_batch_1 carries code \(posix.system\): refused"):
        cifar10_python([write(tmp_path, python2_batch(pixels, LABELS, tail=tail))])
    for opcode in (b"iposix\nsystem\n", b"\x82\x01", b"\x8c\x05posix\x8c\x06system\x93", b"Q", b"P1\n", b"o"):
        with pytest.raises(DataError, match=r"carries code|opcode|do not fit"):
            cifar10_python([write(tmp_path, python2_batch(pixels, LABELS, tail=opcode + b"."))])


def reconstruct(shape: bytes, dtype: bytes, raw: bytes) -> bytes:
    """{data: an array with a made-up state, labels: []}."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape
    array += b"cnumpy\ndtype\nU" + bytes([len(dtype)]) + dtype + b"K\x00K\x01\x87R\x89" + raw + b"tb"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels]u."


HUGE = b"J\xff\xff\xff\x7f"
KEYED = b"\x80\x02}" + b")q\x00" + b"h\x00h\x00\x86q\x00" * 8000 + b"h\x00K\x01s."
NESTED = b"cnumpy\ndtype\nq\x01(" + b"h\x01" * 14_000 + b")" + b"\x85R" * 14_000 + b"t."


@pytest.mark.parametrize(
    "content",
    [
        reconstruct(HUGE + b"M\x00\x0c\x86", b"u1", b"U\x01x"),
        reconstruct(HUGE + HUGE + b"\x86", b"u1", b"U\x01x"),
        reconstruct(b"\x8a\xff" + b"\x7f" * 255 + b"M\x00\x0c\x86", b"u1", b"U\x01x"),
        reconstruct(b"K\x01M\x00\x0c\x86", b"O8", b"T\x00\x0c\x00\x00" + bytes(3072)),
        reconstruct(b"K\x00M\x00\x0c\x86", b"u1", b"U\x00"),
        reconstruct(b"K\x01M\x00\x0c\x86", b"u1", b"X\x04\x00\x00\x00" + "😀".encode()),
        reconstruct(b"K\x01M\x00\x0c\x86", b"u1", b"T\xff\xff\xff\x7f" + bytes(3072)),
        b"\x80\x02" + b"(" * 60_000 + b".",
        b"\x80\x02" + b"]" + b"]a" * 30_000 + b".",
        b"\x80\x02" + b"]" * 30_000 + b"a" * 29_999 + b".",
        b"\x80\x02N" + b"\x85" * 60_000 + b".",
        b"\x80\x02}(" + b"}(" * 30_000 + b".",
        KEYED,
        NESTED,
        b"\x80\x02Nr\xff\xff\xff\xff0.",
        b"\x80\x02Nr\xff\xff\xff\xff.",
        b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"I" + b"9" * 60_000 + b"\n.",
        b"\x80\x02h\x07.",
        b"\x80\x02(u.",
        b"\x80\x02R.",
        b"\x80\x02.",
        b".",
        b"",
        b"\xff\xfe",
        b"<html>404</html>",
    ],
)
def test_hostile_or_broken_pickles_are_refused_quickly(tmp_path, content):
    start = time.process_time()
    with pytest.raises(DataError, match="data_batch_1"):
        cifar10_python([write(tmp_path, content)])
    assert time.process_time() - start < 5  # seconds of this process alone; a hang would be hours


def test_a_pickle_of_something_else_is_refused(tmp_path, pixels):
    keys, array = "expected a dictionary with data and labels", "uint8 array [N, 3072]"
    labels = "list of 7 whole numbers"
    for content, words in (
        ([pixels, LABELS], keys),
        ({"data": pixels, "fine_labels": LABELS}, keys),
        ({"data": pixels.astype(np.float32), "labels": LABELS}, array),
        ({"data": pixels[:, :784], "labels": LABELS}, array),
        ({"data": pixels.astype(object), "labels": LABELS}, array),
        ({"data": [1, 2], "labels": LABELS}, array),
        ({"data": pixels, "labels": LABELS[:-1]}, labels),
        ({"data": pixels, "labels": ["cat"] * 7}, labels),
        ({"data": pixels, "labels": [*range(6), 10]}, "a label is not in 0 to 9"),
        ({"data": pixels, "labels": [*range(6), 2**700]}, "a label is not in 0 to 9"),
    ):
        with pytest.raises(DataError, match=re.escape(words)):
            cifar10_python([write(tmp_path, pickle.dumps(content, 2))])


def test_a_truncated_pickle_is_refused_wherever_it_stops(tmp_path, pixels):
    content = python2_batch(pixels[:1], LABELS[:1])
    for stop in [*range(0, 300, 7), *range(len(content) - 30, len(content))]:
        with pytest.raises(DataError, match="data_batch_1 is damaged"):
            cifar10_python([write(tmp_path, content[:stop])])


# where files are


def test_locate_finds_all_files_in_one_place(tmp_path):
    (tmp_path / "raw").mkdir()
    for name in ("a.gz", "raw/a", "raw/b", "raw/b.gz"):
        write(tmp_path, b"", name)
    found = locate(["a", "b"], tmp_path, ("", "raw"), "a page", endings=("", ".gz"))
    assert found == [tmp_path / "raw/a", tmp_path / "raw/b"]
    assert locate(["a"], tmp_path, ("", "raw"), "a page", endings=("", ".gz")) == [tmp_path / "a.gz"]


def test_locate_says_what_is_missing_where_most_was_found(tmp_path):
    (tmp_path / "raw").mkdir()
    for name in ("a", "raw/a", "raw/b"):
        write(tmp_path, b"", name)
    with pytest.raises(DataError) as error:
        locate(["a", "b", "c"], tmp_path, ("", "raw"), "https://example.org")
    message = str(error.value)
    assert f"not found in {tmp_path / 'raw'}: c." in message
    assert "https://example.org" in message and "login node" in message and "--data" in message
    with pytest.raises(DataError, match=f"not found in {tmp_path / 'none'}: a, b"):
        locate(["a", "b"], tmp_path / "none", ("", "raw"), "a page")
    assert str(Path("data").absolute()) in str(missing(["a"], Path("data"), "a page"))
