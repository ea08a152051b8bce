"""Tests that tokens are written once, by one process or several, and that a killed writing goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grappe.data import Corpus, Packed
from grappe.data.corpus import tokenizing
from grappe.errors import DataError, UsageError
from grappe.launch import files
from tests.data.corpus.shards import corpus_folder, row


def words(texts):
    return [[len(word) for word in text.split()] for text in texts]


def test_tokens_are_written_once_and_shared_by_processes(tmp_path):
    corpus = Corpus(corpus_folder(tmp_path / "corpus", ".jsonl.gz", 95))
    (tmp_path / "shared").mkdir()
    with (tmp_path / "shared/.tokens-000001.arrow.lock").open("w") as lock:  # as another process would hold it
        assert files.take_lock(lock)
        done = tokenizing.tokenize(corpus, tmp_path / "shared", words, end=0, rows_per_part=20)
    assert (done.parts, done.rows, done.were_there) == (5, 75, 1)
    done = tokenizing.tokenize(corpus, tmp_path / "tokens", words, end=0, rows_per_part=20)
    assert (done.parts, done.rows, done.were_there) == (5, 95, 0)
    again = tokenizing.tokenize(corpus, tmp_path / "tokens", words, end=0, rows_per_part=20)
    assert (again.rows, again.were_there) == (0, 5)
    tokens = Corpus(tmp_path / "tokens")
    assert [list(tokens[n]["tokens"]) for n in range(95)] == [[*words([row(n)["text"]])[0], 0] for n in range(95)]
    assert len(Packed(tokens, 16)) > 20
    with pytest.raises(UsageError, match="begun with other files or settings"):
        tokenizing.tokenize(corpus, tmp_path / "tokens", words, rows_per_part=20)
    with pytest.raises(DataError, match="has no text in 'txt', but id, text, tokens: give --column"):
        tokenizing.tokenize(corpus, tmp_path / "more", words, column="txt")


def test_an_end_that_the_tokenizer_adds_is_there_once(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n{"text": ""}\n')

    def letters(texts):
        return [[*map(ord, text.split()), *[7] * ("a" in text)] for text in texts]

    tokenizing.tokenize(Corpus(folder), tmp_path / "tokens", letters, end=7)
    tokens = Corpus(tmp_path / "tokens")
    assert [list(tokens[place]["tokens"]) for place in range(3)] == [[97, 98, 7], [99, 7], [7]]
    (folder / "a.jsonl").write_text('{"text": "a b"}\n{"text": null}\n')
    with pytest.raises(DataError, match="row 1 has a null in 'text'"):
        tokenizing.tokenize(Corpus(folder), tmp_path / "more", words)


def test_a_killed_tokenizing_goes_on(tmp_path):
    corpus_folder(tmp_path / "corpus", ".jsonl", 95)
    code = (
        "import time\nfrom grappe.data import Corpus\nfrom grappe.data import tokenize\n"
        "def slow(texts):\n    time.sleep(0.2)\n    return [[len(w) for w in t.split()] for t in texts]\n"
        "tokenize(Corpus('corpus'), __import__('pathlib').Path('tokens'), slow, rows_per_part=8)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    while len(list((tmp_path / "tokens").glob("*.arrow"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    there = len(list((tmp_path / "tokens").glob("*.arrow")))
    done = tokenizing.tokenize(Corpus(tmp_path / "corpus"), tmp_path / "tokens", words, rows_per_part=8)
    assert done.were_there == there < 12
    tokens = Corpus(tmp_path / "tokens")
    assert [list(tokens[n]["tokens"]) for n in range(95)] == [words([row(n)["text"]])[0] for n in range(95)]


def test_a_tokenizer_neither_cuts_nor_fills_documents(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "[PAD]": 1, "a": 2, "b": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(pad_id=1, length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encode, _ = tokenizing.tokenizer_of(tmp_path / "tokenizer.json")
    assert encode(["a b a b", "b"]) == [[2, 3, 2, 3], [3]]
