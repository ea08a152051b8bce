"""Tests that a corpus reads each row of every format once an epoch, in an order of the seed and the files alone."""

import gzip
import json
import pickle
import random
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from torch.utils.data import TensorDataset

import grappe
from grappe.data import Corpus
from grappe.data.corpus import formats
from grappe.data.datasets import training_order
from grappe.data.sampling import SampleOrder
from grappe.errors import DataError, TaskError
from grappe.task import Task
from grappe.training.run import Run
from tests.commands import GRAPPE, Command, ran
from tests.data.corpus import shards
from tests.data.corpus.shards import ENDINGS, SEQUENTIAL, corpus_folder, expected, identity, options


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(formats, "BLOCK_BYTES", 500)


@pytest.mark.parametrize("ending", ENDINGS)
def test_reads_the_rows_as_they_are(tmp_path, ending):
    folder = corpus_folder(tmp_path / "corpus", ending)
    corpus = Corpus(folder, **options(ending))
    assert len(corpus) == 95
    assert [identity(ending, corpus[place]) for place in range(95)] == [expected(ending, n) for n in range(95)]
    if ending not in (".tar", ".bin"):
        assert corpus[12]["text"] == shards.row(12)["text"] and list(corpus[12]["tokens"]) == shards.row(12)["tokens"]
    again = pickle.loads(pickle.dumps(corpus))
    assert identity(ending, again[94]) == expected(ending, 94)
    with pytest.raises(IndexError):
        corpus[95]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_epoch_has_each_row_once_and_seeks(tmp_path, ending):
    corpus = Corpus(corpus_folder(tmp_path / "corpus", ending, 200), window=2, **options(ending))
    order = training_order(Task(batch_size=7, seed=3), corpus)
    whole = order.order(1, 0, 200)
    assert sorted(whole) == list(range(200)) and list(whole) != list(range(200))
    assert np.array_equal(np.concatenate([order.ids(1, step) for step in range(order.steps_per_epoch)]), whole)
    assert np.array_equal(order.order(1, 131, 160), whole[131:160])  # by another object, which has seen nothing before
    assert not np.array_equal(order.order(2, 0, 200), whole)
    assert (order.sampling is None) == corpus.direct


def test_rows_are_mixed_over_a_window_of_blocks_of_several_files(tmp_path):
    corpus = Corpus(corpus_folder(tmp_path / "corpus", ".parquet", 400, 4), window=4)
    first = training_order(Task(batch_size=40), corpus).order(0, 0, 40)
    assert len(set(first // 10)) == 4 and list(first) != sorted(first)  # the rows of four row groups


@pytest.mark.parametrize("ending", SEQUENTIAL)
def test_compressed_files_are_read_in_their_order(tmp_path, ending, monkeypatch):
    corpus = Corpus(corpus_folder(tmp_path / "corpus", ending, 400, 8), window=2)
    begun = []
    begin = formats.Compressed._begin
    monkeypatch.setattr(formats.Compressed, "_begin", lambda self: (begun.append(self.file), begin(self)))
    ids = training_order(Task(batch_size=8), corpus).order(0, 0, 400)
    assert sorted(corpus[int(place)]["id"] for place in ids) == list(range(400))
    assert len(begun) == 8  # each file is unpacked once an epoch
    assert len(corpus._opened) <= 4  # each with megabytes for unpacking


def test_the_index_is_made_once_and_again_when_a_file_changes(tmp_path, capfd):
    folder = corpus_folder(tmp_path / "corpus", ".jsonl")
    assert len(Corpus(folder)) == 95 and "indexing 3 files" in capfd.readouterr().err
    (index,) = folder.glob(".*.corpus.grappe.npy")
    assert index.stat().st_size < 95 * 16 + 500
    assert len(Corpus(folder)) == 95 and capfd.readouterr().err == ""
    shards.write(folder / "part-001.jsonl", range(20))
    assert len(Corpus(folder)) == 83 and "indexing" in capfd.readouterr().err
    content = bytearray(index.read_bytes())
    content[200] ^= 1
    index.write_bytes(bytes(content))
    assert len(Corpus(folder)) == 83 and "indexing" in capfd.readouterr().err
    folder.chmod(0o500)
    assert len(Corpus(str(folder / "*0.jsonl"))) == 31


def test_blank_lines_and_a_missing_last_feed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"id": 0}\n\n\r\n{"id": 1}\r\n{"id": 2}')
    assert [each["id"] for each in map(Corpus(tmp_path / "a.jsonl").__getitem__, range(3))] == [0, 1, 2]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert [each["id"] for each in map(Corpus(tmp_path / "b.jsonl.gz").__getitem__, range(3))] == [0, 1, 2]
    (tmp_path / "c.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="has no rows, in 1 file"):
        Corpus(tmp_path / "c.jsonl")


def _flipped(file):
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 40] = bytes(byte ^ 0xFF for byte in content[middle : middle + 40])
    file.write_bytes(content)


def _unpacks_without_end(file):
    table = pa.table({"id": range(9), "text": ["0" * (1 << 13)] * 9, "tokens": [[1]] * 9})
    if file.suffix == ".parquet":  # each text a number of a few bits
        pq.write_table(table, file)
    elif file.suffix == ".arrow":  # a mapped file cannot be compressed
        with pa.ipc.new_file(str(file), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
    else:
        shards.write(file, [{"id": 0, "text": "0" * (1 << 20), "tokens": [1]}])


def _of_zeros(file):
    content = bytearray(file.read_bytes())
    middle = len(content) // 1024 * 512
    content[middle : middle + 4096] = bytes(4096)
    file.write_bytes(content)


def _nested(file):
    file.write_bytes(b"[" * 100_000 + b"]" * 100_000 + b"\n")


def _cut(file):
    file.write_bytes(file.read_bytes()[: (file.stat().st_size * 2 // 3) | 1])


def _of_other_bytes(file):
    file.write_bytes(b"\x93nothing of the kind" * 300)


BOMBS = dict.fromkeys((".jsonl", *SEQUENTIAL), "a line of .* bytes")
BOMBS |= {".parquet": "needs more than 0.0 GB of memory", ".arrow": "record batches are compressed"}
BOMBS |= {".tar": "a member of 1,048,576 bytes, of at most 65,536"}
DAMAGE = {
    "cut": (_cut, dict.fromkeys(ENDINGS, "")),
    "flipped": (_flipped, dict.fromkeys((".parquet", ".jsonl", *SEQUENTIAL), "")),
    "a hole": (_of_zeros, {".tar": "has something behind its end"}),
    "nested": (_nested, {".jsonl": "recursion"}),
    "another file": (_of_other_bytes, dict.fromkeys([one for one in ENDINGS if one != ".bin"], "")),
    "bomb": (_unpacks_without_end, BOMBS),
}
"""How a shard is damaged, and the words of each format that can tell; any bytes are tokens, and contents of columns
and members have no checksum."""


@pytest.mark.parametrize(("damage", "ending"), [(damage, ending) for damage in DAMAGE for ending in DAMAGE[damage][1]])
def test_a_damaged_shard_is_one_message_or_left_out(tmp_path, ending, damage, capfd, monkeypatch):
    if damage == "bomb":
        monkeypatch.setattr(formats, "MOST_ROW", 1 << 16)
        monkeypatch.setattr(formats, "MOST_GROUP", 1 << 16)
    folder = corpus_folder(tmp_path / "corpus", ending)
    spoil, words = DAMAGE[damage]
    spoil(folder / f"part-001{ending}")

    def read_all(corpus):
        return [identity(ending, corpus[place]) for place in range(len(corpus))]

    with pytest.raises(DataError, match=rf"part-001.*{words[ending]}.*skip_damaged=True") as caught:
        read_all(Corpus(folder, **options(ending)))
    assert "\n" not in str(caught.value)
    capfd.readouterr()
    rest = read_all(Corpus(folder, skip_damaged=True, **options(ending)))
    outside = [expected(ending, number) for number in (*range(31), *range(63, 95))]
    assert set(outside) <= set(rest) and len(rest) < 95
    assert "damaged part" in capfd.readouterr().err


@pytest.mark.parametrize("ending", ENDINGS)
def test_shards_without_rows_and_files_that_change_are_told(tmp_path, ending):
    folder = corpus_folder(tmp_path / "corpus", ending)
    shards.write(folder / f"part-009{ending}", range(0))
    corpus = Corpus(folder, **options(ending))
    assert len(corpus) == 95
    with pytest.raises(DataError, match="has no rows, in 1 file"):
        Corpus(folder / f"part-009{ending}", **options(ending))
    assert corpus[0] is not None
    for change in (lambda file: file.write(b"more of it"), lambda file: file.truncate(0)):
        with (folder / f"part-002{ending}").open("r+b") as file:
            change(file)
        with pytest.raises(DataError, match=r"part-002.*changed after it was indexed"):
            corpus[94]
    with (folder / f"part-000{ending}").open("r+b") as file:  # as it is open, and perhaps mapped
        file.truncate(0)
    with pytest.raises(DataError, match=r"part-000.*changed after it was indexed"):
        corpus[30]  # another block of formats that have some


def test_the_memory_of_blocks_is_that_of_their_rows(tmp_path):
    table = pa.table({"text": ["many times the same words"] * 1000, "id": range(1000)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=500)
    slack = 3 * formats.Parquet.slack  # of two blocks, and of one that is made
    assert 1.5 * table.nbytes <= Corpus(tmp_path / "rows.parquet").memory() - slack < 1.65 * table.nbytes
    assert Corpus(tmp_path / "rows.parquet", columns=["id"]).memory() - slack in range(12000, 12600)
    corpus = Corpus(corpus_folder(tmp_path / "lines", ".jsonl.zst"))
    assert corpus.memory() > corpus.index.blocks["size"].sum()


# Anonymous pages alone: those of libraries are given back to a system that needs memory while it is measured.
GROWN = """
import ctypes, sys
from pathlib import Path
from grappe.data import Corpus
from grappe.data.datasets import training_order
from grappe.task import Task

def resident():
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * 4096

corpus = Corpus(sys.argv[1])
foreseen, order = corpus.memory(), training_order(Task(batch_size=100), corpus)
corpus._blocks.clear(), corpus._opened.clear()
ctypes.CDLL(None).malloc_trim(0)  # what memory() read would else be used again, and not count
before, most = resident(), 0
for step in range(order.steps_per_epoch):
    for row in order.ids(0, step).tolist():
        corpus[row]
    most = max(most, resident())
print(foreseen, most - before)
"""


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_process_grows_by_what_is_foreseen(tmp_path, ending):
    (tmp_path / "rows").mkdir()
    for number in range(20):
        rows = [{"text": random.Random(1000 * number + n).randbytes(500).hex()} for n in range(3000)]
        lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        file = tmp_path / "rows" / f"{number}{ending}"
        if ending == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=1500)
        else:
            file.write_bytes(gzip.compress(lines, 1) if ending == ".jsonl.gz" else zstandard.compress(lines))
    code, out, err = Command(sys.executable, "-c", GROWN, str(tmp_path / "rows"), cwd=tmp_path).end()
    assert code == 0, err
    foreseen, grown = map(int, out.split())
    assert 0.9 * foreseen / 1.4 <= grown <= 1.02 * foreseen, (foreseen, grown)


@pytest.mark.parametrize("ending", SEQUENTIAL)
def test_a_decompression_bomb_is_refused(tmp_path, ending, monkeypatch):
    pack = gzip.compress if ending.endswith("gz") else zstandard.ZstdCompressor().compress
    monkeypatch.setattr(formats, "MOST_RATIO", 10)
    (tmp_path / f"lines{ending}").write_bytes(pack(b"\n" * (1 << 20)))
    with pytest.raises(DataError, match="a decompression bomb"):
        Corpus(tmp_path / f"lines{ending}")


def test_what_cannot_be_a_corpus_is_one_message(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no file that ends in \.parquet"):
        Corpus(tmp_path / "empty")
    with pytest.raises(DataError, match="no such file or folder"):
        Corpus(tmp_path / "absent")
    with pytest.raises(DataError, match="no file has such a name"):
        Corpus(str(tmp_path / "*.parquet"))
    folder = corpus_folder(tmp_path / "corpus", ".jsonl")
    corpus_folder(folder, ".parquet")
    with pytest.raises(DataError, match=r"several formats \(.*\.parquet.*mix them"):
        Corpus(folder)
    with pytest.raises(TaskError, match=r"need dtype="):
        Corpus(corpus_folder(tmp_path / "tokens", ".bin"))
    with pytest.raises(TaskError, match="window=0"):
        Corpus(folder / "part-000.jsonl", window=0)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_pointer_of_git_lfs_is_named(tmp_path, ending):
    (tmp_path / f"a{ending}").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(DataError, match="a pointer of Git LFS, and not the file: fetch it by git lfs pull"):
        Corpus(tmp_path, **options(ending))


def test_files_globs_columns_and_a_view(tmp_path):
    folder = corpus_folder(tmp_path / "corpus", ".jsonl")
    listed = Corpus([folder / "part-002.jsonl", str(folder / "*-000.jsonl")])
    assert [listed[0]["id"], listed[31]["id"]] == [0, 63]  # by their names, whatever the list's order
    corpus = Corpus(folder, lambda row: (row["id"], len(row["text"])))
    assert corpus[7] == (7, 14) and not corpus.keyed
    assert json.loads(json.dumps(corpus.row(7)))["id"] == 7
    file = corpus_folder(tmp_path / "columns", ".parquet") / "part-000.parquet"
    with pytest.raises(DataError, match=r"no column 'txt'.*text"):
        Corpus(file, columns=["txt"])
    assert set(Corpus(file, columns=["text"])[0]) == {"text"}


def test_the_order_depends_on_the_blocks(tmp_path):
    corpus = Corpus(corpus_folder(tmp_path / "a", ".parquet"))
    other = Corpus(corpus_folder(tmp_path / "b", ".parquet"), window=3)
    first, second = (training_order(Task(), each).sampling.fingerprint for each in (corpus, other))
    assert first != second
    same = Corpus(corpus_folder(tmp_path / "c", ".parquet"))
    assert training_order(Task(), same).sampling.fingerprint == first
    assert isinstance(training_order(Task(), same), SampleOrder)


LOOP = """
import json, os, signal
from pathlib import Path
import torch
import grappe
from grappe.data import Corpus, Stream

of_row = lambda row: (torch.tensor([float(row["id"])]), row["id"])
one, other = (Corpus(name, of_row, window=2) for name in ("zst", "parquet"))
data = Corpus.mix({one: 1, other: {0: 0, 20: 1}}, samples=95) if "MIX" in os.environ else one
with grappe.Loop(run="run", save_every=2) as loop:
    net = torch.nn.Linear(1, 1)
    net, optimizer = loop.parallelize(net, torch.optim.SGD(net.parameters(), lr=1e-6))
    for inputs, numbers in loop.batches(data, 8, epochs=2):
        net(inputs).mean().backward()
        optimizer.step()
        rows = numbers.tolist()  # all processes'
        if loop.world.rank == 0:
            with Path("ledger").open("a") as ledger:
                print(json.dumps([loop.step, rows]), file=ledger)
            if str(loop.step) == os.environ.get("DIES"):
                os.kill(os.getpid(), signal.SIGKILL)
    next(loop.batches(Stream([1, 2, 3]), 8))
"""


@pytest.mark.parametrize("mix", [{}, {"MIX": "1"}], ids=["corpus", "mixture"])
def test_a_loop_of_ones_own_reads_a_corpus_on_any_processes_and_refuses_a_stream(tmp_path, mix):
    ledgers = []
    for lives in ([("1", {})], [("2", {"DIES": "5"}), ("1", {"DIES": "15"}), ("3", {})]):
        folder = tmp_path / f"{len(lives)}"
        corpus_folder(folder / "zst", ".jsonl.zst")
        corpus_folder(folder / "parquet", ".parquet")
        (folder / "loop.py").write_text(LOOP)
        for processes, dies in lives:
            command = [GRAPPE, "launch", "--plan", f"replicate={processes}", "loop.py"]
            done = ran(*command, cwd=folder, XDG_STATE_HOME=str(tmp_path / "state"), **mix, **dies)
            assert dies or "each process would read the whole stream" in done.stderr, done.stderr
        ledgers.append(dict(map(json.loads, (folder / "ledger").read_text().splitlines())))
    assert ledgers[0] == ledgers[1] and list(ledgers[0]) == list(range(24))
    if not mix:
        epochs = [[n for step in range(first, first + 12) for n in ledgers[0][step]] for first in (0, 12)]
        assert epochs[0] != epochs[1] and all(sorted(ids) == list(range(95)) for ids in epochs)
    counts = [Run(tmp_path / f"{lives}" / "run").read_description() for lives in (1, 3)]
    assert [sum(each.get("drawn", {}).values()) for each in counts] == [190 if mix else 0] * 2
    if mix:
        assert counts[0]["drawn"] == counts[1]["drawn"] and counts[0]["drawn"]["parquet"] > 40
        until = counts[1]["drawn_until"]
        assert list(until) == ["3", "6", "9", "12", "15", "18", "21", "24"]
        assert sum(until["6"].values()) == 48 and sum(until["12"].values()) == 95


def test_a_loop_notes_what_is_drawn_over_its_calls_and_starts(tmp_path):
    sources = {TensorDataset(torch.ones(9, 1)): 1, TensorDataset(torch.ones(30, 1)): {0: 1, 60: 3}}
    data = Corpus.mix(sources, samples=12, names="ab")
    told = []
    for stops in (range(0), range(7, 30, 9)):
        run = tmp_path / f"{len(stops)}"
        for stop in (*stops, 30):
            with grappe.Loop("threads=1", run, save_every=2) as loop:  # the plan of all loops in the tests' process
                for epoch in loop.epochs(30):
                    batches = loop.batches(data, 4)
                    for number, _ in enumerate(batches):
                        if epoch == stop and number == 1:  # as if killed behind the save
                            loop._closed = True
                            batches.close()
                            break
                    if loop._closed:
                        break
            loop._folder._lease.release()
        told.append(Run(run).read_description())
    assert told[0]["drawn"] == told[1]["drawn"] and sum(told[0]["drawn"].values()) == 360
    assert told[0]["drawn"]["b"] > 1.5 * told[0]["drawn"]["a"]
    for each in told:
        until = {int(step): counts for step, counts in each["drawn_until"].items()}
        assert len(until) <= 16 and list(until) == sorted(until)
        assert all(sum(counts.values()) == 4 * step for step, counts in until.items())
