"""The guide on large data: its task learns, and its commands run in its order."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from benchmarks import photos

from grappe.cli.commands import app
from tests.commands import GRAPPE, ran

PAGE = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
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


def test_the_commands_run_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos.py").write_text(CODE[0])
    assert [line.split()[1:3] for line in COMMANDS] == [
        ["-m", "benchmarks.photos"],
        ["train", "photos.py"],
        ["measure", "photos.py"],
        ["data", "bench"],
        ["data", "index"],
        ["data", "check"],
        ["data", "pack"],
        ["data", "stage"],
    ]
    for line in COMMANDS:
        if " measure " in line:
            continue  # many trainings: tests/verbs/measure
        more = ("epochs=1", "--plan", "threads=1,device=cpu,workers=1", "--run", "run") if " train " in line else ()
        run(line, tmp_path, *more)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["count"] for one in records if one["kind"] == "evaluation"] == [8]
    packed = CODE[0].replace('folder / "train"', 'folder / "packed"')
    (tmp_path / "photos.py").write_text(packed)
    run(COMMANDS[1], tmp_path, "epochs=1", "--plan", "threads=1,device=cpu", "--run", "other")
    assert list((tmp_path / "photos").glob("*.npy"))
    assert (tmp_path / "node" / "packed").is_dir()


@pytest.mark.parametrize("name", ["CentreCrop", "Images", "Normalise", "RandomResizedCrop", "stage"])
def test_every_public_name_is_in_the_guide(name: str) -> None:
    assert name in PAGE
