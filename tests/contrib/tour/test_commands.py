"""The tour: its commands are shown, run one by one in a terminal, and it ends and continues where the user says."""

import os
import pty
import sys
from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.contrib.tour.commands import COMMANDS


def in_a_terminal(answers: list[str], *arguments: str) -> tuple[int, str]:
    """Runs the tour in a pseudo-terminal and types an answer at each question; returns its exit code and output."""
    typed, text = iter(answers), bytearray()

    def read(terminal: int) -> bytes:
        part = os.read(terminal, 4096)
        text.extend(part)
        if text.endswith(b"end ") or b"q: end " in part:
            os.write(terminal, next(typed).encode())
        return part

    command = [sys.executable, "-m", "grappe", "tour", *arguments]
    return os.waitstatus_to_exitcode(pty.spawn(command, read)), text.decode()


def test_without_a_terminal_the_commands_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["tour", "--step", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("  grappe ") == sum(map(len, COMMANDS[1:]))
    assert "2 of 6." in said and "1 of 6." not in said


def test_a_step_runs_and_the_tour_says_how_to_continue(here: Path) -> None:
    code, said = in_a_terminal(["\n", "q\n"], "--step", "5")
    assert code == 0
    assert "GPU or CPU" in said
    assert "grappe tour --step 6" in said


@pytest.mark.nightly
def test_the_whole_tour(here: Path) -> None:
    code, said = in_a_terminal(["\n"] * len(COMMANDS))
    assert code == 0
    assert "grappe: " not in said.replace("grappe: warning", "").replace("grappe: job.sh", "")
    for words in (
        "paused after --steps",
        "finished, 46 steps",
        "same: digits",
        "RGU-hours",
        "#SBATCH --account=def-me",
    ):
        assert words in said
