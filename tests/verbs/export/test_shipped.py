"""Shipped tasks go through export: in Python and by the C++ program, at four batch sizes.

All of them would be minutes of compiling: docs/export.md has the table of shipped.py, and here are a convolutional
network and a transformer. Digits: test_program.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import needs
from tests.verbs.export.shipped import SHIPPED, exported


@pytest.mark.parametrize("name", ["cifar10", "pysource context=32"])
def test_the_program_predicts_what_the_run_does(name: str, tmp_path: Path) -> None:
    needs.compiler()
    size, proof = SHIPPED[name].task.batch_size, exported(name, tmp_path)["proof"]
    assert proof["batch_sizes"] == [1, 2, size]
    assert proof["samples"] > size
    assert proof["samples"] % size  # the fourth size is of the last batch
    assert proof["largest_difference"] <= 1e-5
