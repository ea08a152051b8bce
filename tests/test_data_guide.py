"""The guides on large data and on corpora: their tasks learn, and their commands run in their order."""

import json
import re
import shlex
from pathlib import Path

import pytest
from benchmarks import photos

from grappe.cli.commands import app
from tests.commands import GRAPPE, ran
from tests.data.corpus.shards import corpus_folder

DOCS = Path(__file__).parent.parent / "docs"
PAGE, FEED, CORPUS = ((DOCS / name).read_text() for name in ("data.md", "feed-gpu.md", "corpus.md"))
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^(?:grappe|python -m) .*", PAGE, re.MULTILINE)


def run(command: str, folder: Path, *more: str) -> None:
    """Runs a training in a process of its own; `grappe data` here, as starting takes longer than it does."""
    less = {"--images 400": "--images 40", "--size 64": "--size 64 --images 8 --seconds 0.01"}
    for many, few in less.items():
        command = command.replace(many, few)
    plain = shlex.split(command)
    if plain[0] == "python":
        photos.main(plain[3:])
        return
    if plain[1] == "data":
        assert app(plain[1:], exit_on_error=False, print_error=False) == 0
        return
    done = ran(GRAPPE, *plain[1:], *more, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_run_in_this_order(here: Path) -> None:
    (here / "photos.py").write_text(CODE[0])
    names = ["-m benchmarks.photos", "train photos.py"]
    names += [f"data {verb}" for verb in ("index", "check", "pack", "stage")]
    assert [" ".join(line.split()[1:3]) for line in COMMANDS] == names
    for line in [*COMMANDS, *re.findall(r"^grappe data .*", FEED, re.MULTILINE)]:
        more = ("epochs=1", "--plan", "threads=1,device=cpu,workers=1", "--run", "run") if " train " in line else ()
        run(line, here, *more)
    records = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["count"] for one in records if one["kind"] == "evaluation"] == [8]
    packed = CODE[0].replace('folder / "train"', 'folder / "packed"')
    (here / "photos.py").write_text(packed)
    run(COMMANDS[1], here, "epochs=1", "--plan", "threads=1,device=cpu", "--run", "other")
    assert list((here / "photos").glob("*.npy"))
    assert (here / "node" / "packed").is_dir()


@pytest.mark.parametrize("name", ["CentreCrop", "Images", "Normalise", "RandomResizedCrop", "stage"])
def test_every_public_name_is_in_the_guide(name: str) -> None:
    assert name in PAGE


def test_the_commands_on_a_corpus_train_on_a_mixture(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 1, "text": 2, "7": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus_folder(tmp_path / "web", ".parquet", 300)
    corpus_folder(tmp_path / "books", ".jsonl.zst", 300)
    [code], lines = re.findall(r"```python\n(.*?)```", CORPUS, re.DOTALL), re.findall(r"(?m)^grappe .*", CORPUS)
    (tmp_path / "language.py").write_text(code)
    assert len(lines) == 3
    for line in lines:
        more = ["--steps", "6", "--run", "run"] if " train " in line else []
        done = ran(GRAPPE, *shlex.split(line)[1:], *more, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
        assert done.returncode == 0, done.stderr
    drawn = json.loads((tmp_path / "run/run.json").read_text())["drawn"]
    assert sum(drawn.values()) == 48 and drawn["web"] > drawn["books"] > 0
