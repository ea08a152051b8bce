"""The guide on corpora: its commands write tokens, and its task trains on the mixture."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.commands import GRAPPE, ran
from tests.data.corpus.shards import corpus_folder

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "corpus.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^grappe .*", PAGE, re.MULTILINE)


def test_the_guides_commands_train_on_a_mixture(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 1, "text": 2, "7": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus_folder(tmp_path / "web", ".parquet", 300)
    corpus_folder(tmp_path / "books", ".jsonl.zst", 300)
    (tmp_path / "language.py").write_text(CODE[0])
    assert len(COMMANDS) == 3
    for command in COMMANDS:
        more = ["--steps", "6", "--run", "run"] if " train " in command else []
        done = ran(GRAPPE, *shlex.split(command)[1:], *more, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
        assert done.returncode == 0, done.stderr
    drawn = json.loads((tmp_path / "run/run.json").read_text())["drawn"]
    assert sum(drawn.values()) == 48 and drawn["web"] > drawn["books"] > 0
