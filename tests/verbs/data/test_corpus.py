"""Tests of grappe data index, check and tokenize on corpora of rows, as a user types them."""

import json

import pytest

from grappe.cli.commands import app
from grappe.data import Corpus
from grappe.data.corpus.tokenizing import tokenizer_of
from grappe.errors import DataError
from tests.data.corpus.shards import corpus_folder


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def answer(capsys, *words):
    app([*words, "--json"], exit_on_error=False, print_error=False)
    return json.loads(capsys.readouterr().out)


def test_index_and_check(tmp_path, capsys):
    folder = str(corpus_folder(tmp_path / "corpus", ".jsonl", 95))
    made = answer(capsys, "data", "index", folder)
    assert (made["rows"], made["files"], made["source"], made["direct"]) == (95, 3, "JsonLines", True)
    lines = (tmp_path / "corpus/part-001.jsonl").read_bytes().split(b"\n")
    (tmp_path / "corpus/part-001.jsonl").write_bytes(b"\n".join([*lines[:5], b'{"id": ', *lines[6:]]))
    checked = answer(capsys, "data", "check", folder)
    assert checked["rows"] == 94 and "part-001.jsonl: the line at byte" in checked["damaged"][0]
    with pytest.raises(DataError, match=r"is no JSON.*grappe data check"):
        [Corpus(folder)[place] for place in range(95)]


def test_a_tokenizer_is_a_file_of_json(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "text": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = str(corpus_folder(tmp_path / "corpus", ".parquet", 40))
    out = str(tmp_path / "out")
    done = answer(capsys, "data", "tokenize", folder, "--out", out, "--tokenizer", str(tmp_path), "--end", "7")
    assert done["rows"] == 40 and list(Corpus(out)[1]["tokens"]) == [1, 0, 1, 0, 7]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"is no tokenizer\.json"):
        tokenizer_of(tmp_path)
