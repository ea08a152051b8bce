"""Files below a run are opened without following links; every other file that the source opens has its reason here."""

import ast
import errno
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import grappe
from grappe.errors import RunError
from grappe.launch import files
from grappe.launch.files import IN_PART

ROOT = Path(grappe.__file__).parent
OPENS = """
open safe_open memmap save savez read_text read_bytes write_text write_bytes mkdir makedirs touch unlink rmdir remove
rmtree rename replace move truncate link symlink symlink_to hardlink_to copyfile copytree iterdir glob rglob scandir
listdir
"""
ELSEWHERE = tomllib.loads(Path(__file__).with_name("opened_elsewhere.toml").read_text())
"""Files of the source that open something else than what is in a run, and what."""


def opened(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(of, ast.Name) and of.id in ("files", "dataclasses", "self"):
            continue  # grappe.launch.files; dataclasses.replace; a method of one's own
        if name == "replace" and (len(node.args) != 1 or node.keywords) and not _is(of, "os"):
            continue  # a string's
        own = name in ("remove", "link", "truncate", "move", "save") or (name == "rename" and len(node.args) != 1)
        if own and not _is(of, "os", "shutil", "np"):
            continue  # a list's, or a function of grappe's
        if name in OPENS.split():
            yield node.lineno, name


def _is(node: ast.expr | None, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def test_what_opens_files_is_found() -> None:
    def found(text: str) -> list[str]:
        return [name for _, name in opened(ast.parse(text))]

    of_paths = found("open(a)\na.open('rb')\nos.open(a, 0)\na.read_text()\na.unlink()")
    assert of_paths == ["open", "open", "open", "read_text", "unlink"]
    of_modules = found("shutil.rmtree(a)\na.replace(b)\nos.replace(a, b)\na.rename(b)\nos.remove(a)")
    assert of_modules == ["rmtree", "replace", "replace", "rename", "remove"]
    assert found("files.replace(a, b)\n'a'.replace('b', 'c')\ndataclasses.replace(a, b=c)\nlist.remove(1)") == []


def test_files_of_a_run_are_opened_in_one_place() -> None:
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        lines = list(opened(ast.parse(file.read_text())))
        if lines:
            found[str(file.relative_to(ROOT))] = lines
    strangers = {name: lines for name, lines in found.items() if name not in ELSEWHERE}
    assert not strangers, f"take grappe.launch.files, or say in opened_elsewhere.toml what is opened: {strangers}"
    assert not set(ELSEWHERE) - set(found), "these open nothing any more"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/logs/log").write_text("ours")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/log").write_text("theirs")
    return tmp_path / "run"


def test_a_folder_on_the_way_is_no_link(run: Path, tmp_path: Path) -> None:
    (run / "part").symlink_to(tmp_path / "outside")
    for act in (
        lambda file: files.read_bytes(file, IN_PART),
        lambda file: files.appender(file, IN_PART),
        lambda file: files.new_file(file.with_name("new"), IN_PART),
        lambda file: files.replace(file, b"", IN_PART),
        lambda file: files.make_folder(file.with_name("new"), IN_PART),
        lambda file: files.rename(file, file.with_name("new"), IN_PART),
        lambda file: files.remove(file, IN_PART),
        lambda file: files.remove_tree(file.parent),
        lambda file: files.names(file.parent),
        lambda file: files.flush(file.parent),
        lambda file: files.make_folder(file.parent),
    ):
        with pytest.raises((RunError, OSError), match=r"part is a link|symbolic link"):
            act(run / "part/log")
    assert [(one.name, one.read_text()) for one in (tmp_path / "outside").iterdir()] == [("log", "theirs")]


def test_the_file_itself_is_no_link(run: Path, tmp_path: Path) -> None:
    for target in ("outside/log", "outside/none"):
        (run / "logs/link").unlink(missing_ok=True)
        (run / "logs/link").symlink_to(tmp_path / target)
        for act in (files.read_bytes, files.appender):
            with pytest.raises(RunError, match="logs/link is a link"):
                act(run / "logs/link", IN_PART)
    with pytest.raises(FileExistsError):
        files.new_file(run / "logs/link", IN_PART)
    files.replace(run / "logs/link", b"new", IN_PART)
    assert files.read_text(run / "logs/link", IN_PART) == "new"
    assert sorted(one.name for one in (run / "logs").iterdir()) == ["link", "log"]
    assert not (tmp_path / "outside/none").exists()


def test_a_pipe_is_no_file_and_nobody_waits_for_it(run: Path) -> None:
    os.mkfifo(run / "pipe")
    with pytest.raises(RunError, match="is not a file"):
        files.reader(run / "pipe")
    with pytest.raises((RunError, OSError)):
        files.appender(run / "pipe")


def test_new_files_have_the_users_mode(run: Path) -> None:
    before = os.umask(0o027)
    try:
        files.replace(run / "a", b"")
        files.appender(run / "b").close()
        files.new_file(run / "c").close()
        files.replace(run / "secret", b"", mode=files.PRIVATE)
    finally:
        os.umask(before)
    modes = {one.name: one.stat().st_mode & 0o777 for one in run.iterdir() if one.is_file()}
    assert modes == {"a": 0o640, "b": 0o640, "c": 0o640, "secret": 0o600}


def test_a_failed_replacement_leaves_the_old(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.replace(run / "logs/log", b"new", IN_PART, durable=True)
    assert [(one.name, one.read_text()) for one in (run / "logs").iterdir()] == [("log", "ours")]


def test_paths_may_be_relative_and_short(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "logs")
    assert files.read_text(Path("log"), 3) == "ours"
    assert files.names(Path(), 2) == ["log"]


def test_a_lock_is_one_process_s_and_a_disk_without_locks_refuses_nobody(tmp_path, monkeypatch):
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as other:
        assert files.take_lock(one)
        assert not files.take_lock(other)

        def without(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "no locks")

        monkeypatch.setattr(files.fcntl, "flock", without)
        assert files.take_lock(other)
