"""Types commands of grappe in this process, which takes no time to start, and stands in for other programs."""

import os
from pathlib import Path
from typing import Any

import pytest

from grappe.cli import commands
from grappe.errors import GrappeError


def grappe(*words: str) -> Any:
    """Returns the exit code of a command; its errors are raised."""
    return commands.app(list(words), exit_on_error=False, print_error=False)


def ended(*words: str) -> int:
    """Returns the exit code of a command that ends as from a shell, with its message on standard error."""
    with pytest.raises(SystemExit) as end:
        commands.main(words)
    return int(end.value.code or 0)


def refused(*words: str) -> str:
    """Returns the message with which a command is refused."""
    with pytest.raises(GrappeError) as refusal:
        grappe(*words)
    assert refusal.value.exit_code == 2
    return str(refusal.value)


def stand_in(folder: Path, patch: pytest.MonkeyPatch | None = None, **programs: str) -> None:
    """Writes programs of these lines of the shell into a folder, which `patch` puts on the search path."""
    folder.mkdir(exist_ok=True)
    for name, lines in programs.items():
        file = folder / name
        file.write_text(f"#!/bin/sh\n{lines}\n")
        file.chmod(0o755)
    if patch is not None:
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
