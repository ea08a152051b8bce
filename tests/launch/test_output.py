"""Tests of process 0's output when nobody reads any more."""

from __future__ import annotations

import os

from rich.console import Console

from grappe.launch.rank import ProcessRank
from grappe.launch.terminal import UserStream, user_stream


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
