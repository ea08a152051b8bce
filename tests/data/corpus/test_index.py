"""Indexes of corpora: which files are data, which columns must agree, which forms of JSON and tokens are read."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grappe.data import Corpus
from grappe.errors import DataError
from tests.data.images.pictures import tar


def rows(corpus: Corpus) -> list:
    return [corpus[place] for place in range(len(corpus))]


def lines(file: Path, count: int = 1) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f'{{"id": {number}}}\n' for number in range(count)))
    return file


def test_a_folder_that_datasets_saved_has_the_rows_that_it_lists(tmp_path: Path, capfd) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"id": [1, 2]})
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "all")
    with pytest.raises(DataError, match=r"is a DatasetDict of several splits: name one of .*all/test, .*all/train$"):
        Corpus(tmp_path / "all")
    data.save_to_disk(tmp_path / "one")
    data.map(lambda row: {"id": -row["id"]}, cache_file_name=str(tmp_path / "one/cache-01.arrow"))
    assert [row["id"] for row in rows(Corpus(tmp_path / "one"))] == [1, 2]
    assert "left out: .arrow 1 (cache-01.arrow)" in capfd.readouterr().err
    (tmp_path / "one/state.json").write_text("[" * 9)
    with pytest.raises(DataError, match=r"state\.json is not what datasets\.save_to_disk writes"):
        Corpus(tmp_path / "one")


@pytest.mark.parametrize(
    "names", [("train/0.jsonl", "test/0.jsonl"), ("data/train-0.jsonl", "data/validation-0.jsonl")]
)
def test_several_splits_are_refused_and_each_is_read(tmp_path: Path, names: tuple[str, str]) -> None:
    files = [lines(tmp_path / "c" / name) for name in names]
    with pytest.raises(DataError, match="has several splits"):
        Corpus(tmp_path / "c")
    assert len(Corpus(files)) == 2  # asked for by name
    assert len(Corpus(files[0])) == 1


def test_a_state_of_something_else_decides_nothing(tmp_path: Path) -> None:
    lines(tmp_path / "c/a.jsonl", 3)
    (tmp_path / "c/state.json").write_text('{"step": 3}')
    assert len(Corpus(tmp_path / "c")) == 3


def test_other_files_and_linked_folders_are_said(tmp_path: Path, capfd) -> None:
    lines(tmp_path / "c/a.jsonl", 3)
    lines(tmp_path / "elsewhere/b.jsonl")
    (tmp_path / "c/README.md").write_text("")
    (tmp_path / "c/.hidden.jsonl").write_text("")
    (tmp_path / "c/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "c/b.jsonl").symlink_to(tmp_path / "elsewhere/b.jsonl")
    assert len(Corpus(tmp_path / "c")) == 4
    assert "left out: .md 1 (README.md), linked folders 1 (more)" in capfd.readouterr().err


NULLS = pa.array([None], pa.null())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array([1], pa.int32()), pa.array([2], pa.int64())),
        (pa.array(["a"]), pa.array(["b"], pa.large_string())),
        (pa.array(["a"]), pa.array(["b"]).dictionary_encode()),
        (pa.array([0.5], pa.float32()), pa.array([0.25])),
        (NULLS, pa.array([2.0])),
        (pa.array([2.0]), NULLS),
    ],
)
def test_columns_of_one_meaning_are_one(tmp_path: Path, first: pa.Array, second: pa.Array) -> None:
    pq.write_table(pa.table({"x": first, "y": [0]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [1], "x": second}), tmp_path / "b.parquet")  # in another order, too
    read = rows(Corpus(tmp_path))
    assert [row["x"] for row in read] == [*first.to_pylist(), *second.to_pylist()]
    assert [row["y"] for row in read] == [0, 1]


@pytest.mark.parametrize("skip", [False, True])
def test_columns_of_two_meanings_are_refused_unless_they_are_not_read(tmp_path: Path, skip: bool) -> None:
    pq.write_table(pa.table({"x": [1], "y": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "b.parquet")
    with pytest.raises(
        DataError, match=r"b\.parquet: the column 'y' is integer and in the files before text\..*columns="
    ):
        Corpus(tmp_path, skip_damaged=skip)  # which would lose whole files
    assert len(Corpus(tmp_path, columns=["x"], skip_damaged=skip)) == 2
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"the column 'y' is missing and in the files before text"):
        Corpus(tmp_path)
    with pytest.raises(DataError, match=r"b\.parquet has no column 'y'"):
        Corpus(tmp_path, columns=["y"])


DIALECTS = {
    "a byte order mark": (b'\xef\xbb\xbf{"t": "x"}\n', [{"t": "x"}]),
    "white space": (b'  \n{"t": "x"}\n \t \r\n  {"t": "y"}\n   ', [{"t": "x"}, {"t": "y"}]),
    "half of a letter": (b'{"t": "a\\ud83d b"}\n', [{"t": "a\ud83d b"}]),
    "no number": (b'{"s": NaN, "u": -Infinity}\n', [{"s": math.nan, "u": -math.inf}]),
}


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json.gz", ".ndjson"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_of_json_lines_are_read(tmp_path: Path, dialect: str, ending: str) -> None:
    content, expected = DIALECTS[dialect]
    (tmp_path / f"a{ending}").write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    assert json.dumps(rows(Corpus(tmp_path))) == json.dumps(expected)


@pytest.mark.parametrize("content", [b'[{"t": 1},\n{"t": 2}]\n', b'[{"t": 1}]\n', b'{\n  "t": 1\n}\n', b"5\n"])
def test_json_that_is_not_in_lines_is_said_and_no_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl: the line at byte 0 is no JSON object.*jq -c") as caught:
        rows(Corpus(tmp_path))
    assert "Fetch it again" not in str(caught.value)


def test_lines_that_begin_with_white_space_in_long_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("grappe.data.corpus.formats._READ", 7)
    (tmp_path / "a.jsonl").write_bytes(
        b"".join(b" " * (n % 5) + b'{"id": %d}\n' % n + b" \n" * (n % 3) for n in range(99))
    )
    assert [row["id"] for row in rows(Corpus(tmp_path))] == list(range(99))


def test_tokens_with_a_header_or_of_another_type_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(np.array([20240520, 1, 9, *[0] * 253], np.int32).tobytes() + bytes(18))
    with pytest.raises(DataError, match=r"a\.bin has llm\.c's header: tail -c \+1025"):
        Corpus(tmp_path / "a.bin", dtype="uint16")
    (tmp_path / "b.bin").write_bytes(bytes(12))
    (tmp_path / "b.idx").write_bytes(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([4]) + bytes(16))
    with pytest.raises(DataError, match=r"b\.bin has tokens of int32, by its index b\.idx: not uint16"):
        Corpus(tmp_path / "b.bin", dtype="uint16")
    assert len(Corpus(tmp_path / "b.bin", dtype="int32")) == 1


@pytest.mark.parametrize(
    ("members", "words"),
    [(["a.txt", "b.txt", "a.json"], r"'a\.json' is no neighbour"), (["a.txt", "a.txt"], r"'a\.txt' is there twice")],
)
def test_rows_of_shards_that_are_not_clear_are_refused(tmp_path: Path, members: list[str], words: str) -> None:
    (tmp_path / "a.tar").write_bytes(tar((name, b"1") for name in members))
    with pytest.raises(DataError, match=words):
        Corpus(tmp_path)
