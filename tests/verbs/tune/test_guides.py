"""The commands in the guides to searches and larger batches are commands that grappe takes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from grappe.cli.commands import app

DOCS = Path(__file__).parents[3] / "docs"


def commands(guide: str) -> list[str]:
    found, fenced = [], False
    for line in (DOCS / guide).read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced and line.startswith("grappe "):
            found.append(line.partition("  #")[0].partition("   #")[0])
    return found


@pytest.mark.parametrize("guide", ["tune.md", "larger-batch.md", "learning-rate.md"])
def test_commands_of_the_guides(guide: str) -> None:
    found = commands(guide)
    assert found
    for line in found:
        app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
