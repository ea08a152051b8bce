"""All that is written to the user goes through launch/terminal.py and launch/safe_console.py; no other file may."""

import ast
import io
import os
import pty
import signal
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

import grappe
from grappe.launch.rank import ProcessRank
from grappe.launch.safe_console import SafeConsole
from grappe.launch.signals import SignalForwarding
from grappe.launch.terminal import CLEAR, UserStream, complain, say, starting, user_stream, wrapped

ROOT = Path(grappe.__file__).parent
HOSTILE = "\x1b]0;owned\x07[red]a[/red]\u202eb:smile:"
SHOWN = r"\x1b]0;owned\x07[red]a[/red]\u202eb:smile:"
WRITERS = ("launch/terminal.py", "launch/safe_console.py")
TO_LOGS = ("launch/child.py", "launch/fork.py")  # a traceback, in what is a process's log
FOREIGN_TEXT = "errors/foreign_text.py"
HELP = "cli/help.py"  # help has grappe's own texts alone, on cyclopts's console
RICH = ("rich.table", "rich.progress", "rich.live", "rich.text")  # a SafeConsole prints what they make


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("content", [HOSTILE, Text(HOSTILE), Group(HOSTILE), pytest.param(HOSTILE, id="table")])
def test_a_console_shows_and_obeys_nothing(content: object, terminal: bool, request: pytest.FixtureRequest) -> None:
    if "table" in request.node.callspec.id:
        content = Table(HOSTILE, title=HOSTILE, box=None)
        content.add_row(HOSTILE)
    stream = io.StringIO()
    SafeConsole(stream, width=200, force_terminal=terminal, color_system=None).print(content)
    assert SHOWN.replace(r"\x07", "") in stream.getvalue().replace(r"\x07", "")  # rich drops some by itself
    assert "\x1b]" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()


def test_say() -> None:
    stream = io.StringIO()
    say(f"one\ntwo {HOSTILE}", stream)
    assert stream.getvalue() == f"one\ntwo {SHOWN}\n"


def bypasses(file: str, source: str) -> list[str]:
    """The places of a source text that write to the user, or make foreign text fit for it, by another way."""
    return [f"{file}:{line} {what}" for line, what in _bypasses(file, ast.parse(source))]


def _bypasses(file: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    if file in WRITERS:
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="print" | "input")):
                yield node.lineno, "print"
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="sys"), attr=stream), attr=way):
                if stream.strip("_") in ("stdout", "stderr") and way in ("write", "writelines", "buffer"):
                    yield node.lineno, "a stream's write"
            case ast.Attribute(value=ast.Name(id="traceback"), attr="print_exc" | "print_exception" | "print_stack"):
                if file not in TO_LOGS:
                    yield node.lineno, "traceback"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="write"), args=[ast.Constant(), *_]):
                yield node.lineno, "os.write"
            case ast.Call(func=ast.Name(id="TextColumn"), keywords=given):
                if not any(one.arg == "markup" and ast.unparse(one.value) == "False" for one in given):
                    yield node.lineno, "markup"
            case ast.Call(func=ast.Name(id="Live" | "Progress"), keywords=given):
                if not any(one.arg == "console" for one in given):
                    yield node.lineno, "a console of rich's own"
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "rich":
                if module not in RICH and [one.name for one in names] != ["Group"] and file != HELP:
                    yield node.lineno, module
            case ast.Import(names=names) if any(one.name.partition(".")[0] == "rich" for one in names):
                yield node.lineno, "rich"
            case ast.Import(names=names) if any(one.name == "html" for one in names) and file != FOREIGN_TEXT:
                yield node.lineno, "html.escape: use html_text"
            case ast.Import(names=names) if any(one.name == "csv" for one in names):
                writes = any(isinstance(one, ast.Attribute) and "riter" in one.attr for one in ast.walk(tree))
                if writes and "spreadsheet_cell" not in {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}:
                    yield node.lineno, "csv without spreadsheet_cell"


def test_nothing_is_written_past_it() -> None:
    found = [
        line for file in sorted(ROOT.rglob("*.py")) for line in bypasses(str(file.relative_to(ROOT)), file.read_text())
    ]
    assert not found, "say it with launch/terminal.py:\n" + "\n".join(found)


PAST_IT = r"""
print(name)
sys.stdout.write(name)
sys.stderr.buffer.write(name)
from rich.console import Console
from rich import print
import rich
Live(table)
TextColumn('{task.description}')
os.write(2, name)
traceback.print_exc()
import html
import csv; csv.writer(f)
"""


@pytest.mark.parametrize("source", PAST_IT.strip().splitlines())
def test_what_goes_past_it_is_found(source: str) -> None:
    assert bypasses("a.py", source)


def test_complaints_are_in_the_users_language(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("GRAPPE_LANG", "fr")
    complain("grappe: warning: the nodes of narval have no GPU: add device=cpu to the plan")
    say("no trial has a result")
    said = capsys.readouterr()
    assert said.err == "grappe : avertissement : les nœuds de narval n'ont pas de GPU : ajoutez device=cpu au plan\n"
    assert said.out == "aucun essai n'a de résultat\n"


def test_a_reader_who_leaves_does_not_end_the_training() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        console = Console(file=UserStream(stream))  # rich ends the process where a pipe breaks
        console.print("first")
        assert os.read(reader, 100) == b"first\n"
        os.close(reader)
        for _ in range(3):
            console.print("nobody hears this")


def test_only_process_0_has_one(monkeypatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv("GRAPPE_TERMINAL", str(writer))
    assert user_stream(ProcessRank(rank=1, size=2)) is None
    mine = user_stream(ProcessRank(rank=0, size=2))
    mine.write("hello")
    mine.flush()
    assert os.read(reader, 100) == b"hello"
    assert "GRAPPE_TERMINAL" not in os.environ  # data workers must not write there
    os.close(reader)


def test_a_start_and_its_stop_are_shown_at_once_on_a_terminal_alone(monkeypatch, capsys):
    starting(2)
    assert capsys.readouterr() == ("", ""), "a log has no such line"
    assert wrapped("word " * 99, io.StringIO()) == "word " * 99, "a log has whole lines"
    terminal, ours = pty.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as reader:

        def shown(end: str) -> str:
            """Reads what the terminal got up to `end`: several writes may come in several reads."""
            text = b""
            while not text.endswith(end.encode()):
                text += reader.read(1)
            return text.decode()

        with os.fdopen(ours, "w") as stream, SignalForwarding(saves=True) as signals:
            monkeypatch.setattr(sys, "stdout", stream)
            monkeypatch.setattr(sys, "stderr", stream)
            starting(2)
            start = shown("…")
            assert start.startswith(CLEAR) and "2 process" in start and "\n" not in start
            termios.tcsetwinsize(ours, (24, 20))
            starting(2)  # on a narrow terminal: what is longer than a line could not be cleared
            assert shown("…") == f"{CLEAR}starting 2 process…"
            say("begins")
            assert shown("\n") == f"{CLEAR}begins\r\n"
            lines = wrapped("a line is broken between words,\nnot in runs/a-name-that-is-longer", stream, indent=2)
            assert lines.split("\n") == [
                "a line is broken", "  between words,", "not in", "  runs/a-name-that-is-longer",
            ]  # fmt: skip
            os.kill(os.getpid(), signal.SIGINT)
            assert shown("stopping and saving") == f"{CLEAR}stopping and saving" and signals.received
