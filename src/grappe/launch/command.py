"""Command: runs one of the system's programs, never through a shell; its output, or why there is none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from grappe.errors import GrappeError

ANSWER_SECONDS = 60.0


class Missing(GrappeError):
    """There is no such program on the PATH."""


class Failed(GrappeError):
    """The program failed or gave no answer; the message is its own, whole.

    Args:
        code: its exit code; None: it gave no answer.
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
    """The standard output of a program that reads `words`; with `both`, its standard error too.

    Raises:
        Missing: it is not on the PATH.
        Failed: its exit code is not 0, or it took longer than `seconds`.
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
        raise Failed(f"{command[0]}: {(done.stderr or done.stdout).strip()}", done.returncode)
    return done.stdout + done.stderr if both else done.stdout
