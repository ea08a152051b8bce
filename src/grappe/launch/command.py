"""Command: runs a program of the system, never through a shell; returns its output, or raises the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import NoReturn

from grappe.errors import GrappeError

ANSWER_SECONDS = 60.0


class Missing(GrappeError):
    """The program is not on the PATH."""


class Failed(GrappeError):
    """The program failed or gave no answer; the message is the program's own, complete.

    Args:
        code: the exit code; None if there was no answer.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


def run(
    *command: str,
    seconds: float = ANSWER_SECONDS,
    both: bool = False,
    words: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs the program and arguments `words`; returns its standard output, with `both` its standard error too.

    Raises:
        Missing: the program is not on the PATH.
        Failed: the exit code is not 0, or the program took longer than `seconds`.
    """
    if shutil.which(command[0]) is None:
        raise Missing(f"{command[0]} is not on the PATH")
    try:
        done = subprocess.run(
            command,
            input=words,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} gave no answer in {seconds:.0f} s: try again later") from None
    if done.returncode:
        answer = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise Failed(f"{command[0]}: {answer}", done.returncode)
    return done.stdout + done.stderr if both else done.stdout


def become(words: Sequence[str]) -> NoReturn:
    """Replaces this process by a program, which keeps the terminal.

    Raises:
        Missing: the program is not on the PATH.
    """
    if shutil.which(words[0]) is None:
        raise Missing(f"{words[0]} is not on the PATH")
    os.execvp(words[0], list(words))
