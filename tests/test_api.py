"""The stable surface: docs/api.md lists every public name, and nothing that cannot be imported."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grappe
import grappe.data
import grappe.optimizers
import grappe.slurm

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"
LISTED = re.findall(r"^### `(grappe[\w.]*)`", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", LISTED)
def test_what_is_listed_can_be_imported(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


@pytest.mark.parametrize(
    "module", [grappe, grappe.data, grappe.optimizers, grappe.slurm], ids=lambda module: module.__name__
)
def test_the_page_lists_what_a_module_says_is_public(module) -> None:
    listed = [name.rpartition(".")[2] for name in LISTED if name.rpartition(".")[0] == module.__name__]
    assert listed == sorted(module.__all__)
    assert len(set(listed)) == len(listed)


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/api.py", "--check"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
