"""Tests grappe train on wrong tasks: one message each, which names the user's line and says what to do; exit code 2."""

import multiprocessing
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from grappe.launch import local
from grappe.training import worker  # noqa: F401 - the forked processes have it, too
from tests.tasks.error_corpus import BOTH, CASES, PARTS, TASK, Case
from tests.typed import ended

SEEN_BY_TRAINING_ONLY = ("in place on what backward needs", "a parameter that is made in forward")
"""What only a training's own first step looks for: verify's plain process has none."""


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes are forked from this one, which has all imported: a second saved in each case."""
    monkeypatch.setattr(local, "_context", lambda processes: multiprocessing.get_context("fork"))
    monkeypatch.setattr(local, "start_server", lambda *_, **__: None)
    yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_process(case: Case, tmp_path: Path, monkeypatch, capfd) -> None:
    check(case, "", tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize("name", BOTH)
def test_two_processes(name: str, tmp_path: Path, monkeypatch, capfd) -> None:
    case = next(case for case in CASES if case.name == name)
    check(case, "replicate=2,", tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize("case", PARTS, ids=lambda case: case.name)
def test_parts_of_samples(case: Case, tmp_path: Path, monkeypatch, capfd) -> None:
    check(case, "domain=2,", tmp_path, monkeypatch, capfd)


def test_a_sharded_model(tmp_path: Path, monkeypatch, capfd) -> None:
    """Each process has a part of the model: the line is found without its values."""
    case = next(case for case in CASES if case.name == "in place on what backward needs")
    check(case, "shard=2,", tmp_path, monkeypatch, capfd)


@pytest.mark.parametrize("name", [name for name in BOTH if name not in SEEN_BY_TRAINING_ONLY])
def test_verify(name: str, tmp_path: Path, monkeypatch, capfd) -> None:
    case = next(case for case in CASES if case.name == name)
    words = ["verify", "task.py", "--plan", "replicate=2,threads=1,device=cpu", "--steps", "1"]
    check(case, "", tmp_path, monkeypatch, capfd, words)


def test_the_task_itself_is_right(tmp_path: Path, monkeypatch, capfd) -> None:
    code, said = train(TASK, "workers=1,", tmp_path, monkeypatch, capfd)
    assert (code, said) == (0, "")


def check(case: Case, plan: str, tmp_path: Path, monkeypatch, capfd, words: Sequence[str] | None = None) -> None:
    code, said = train(case.text, plan, tmp_path, monkeypatch, capfd, words)
    assert code == 2, said
    progress = "one plain process\n" if words else ""
    assert re.fullmatch(rf"{progress}grappe: [^\n]+\n", said), said  # one message, no traceback
    assert case.says in said or (plan and case not in PARTS) or words  # verify's first batch is another
    assert case.fix in said
    assert "grappe's own" not in said
    assert "src/grappe" not in said
    if case.line is not None:
        assert f"task.py, line {case.line}" in said


def train(
    text: str, plan: str, tmp_path: Path, monkeypatch, capfd, words: Sequence[str] | None = None
) -> tuple[object, str]:
    """The exit code of `grappe train task.py`, or of other words, and what it says on standard error."""
    (tmp_path / "task.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    words = words or ["train", "task.py", "--plan", f"{plan}threads=1,device=cpu"]
    # capfd puts its own streams there, which stay on the terminal where a process redirects its file descriptors
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        monkeypatch.setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115
    return ended(*words), capfd.readouterr().err
