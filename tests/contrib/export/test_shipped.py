"""Shipped tasks go through export: in Python and by the C++ program, at four batch sizes.

All of them would be minutes of compiling: docs/benchmarks.md has the table of shipped.py. Two are in `make soak`,
and a small transformer, with weights in int8, in Python here. Digits: test_program.py.
"""

from pathlib import Path

import pytest

from grappe.contrib.export.export import export
from grappe.contrib.export.folder import ExportOptions
from grappe.tasks.pysource import PySource
from grappe.training.run import Run
from tests import needs
from tests.contrib.export.shipped import SHIPPED, exported
from tests.training.test_training import train

pytestmark = pytest.mark.slow


def test_a_transformer_is_exported_with_weights_in_int8(tmp_path: Path) -> None:
    needs.compiler()
    task = PySource(batch_size=7, context=16, width=16, depth=1, heads=2, megabytes=0.3)
    run = Run(train(tmp_path / "run", task, "threads=1", steps=1).run)
    done = export(run, tmp_path / "out", ExportOptions(weights="int8", no_build=True), task=PySource, data=tmp_path)
    assert done.proof.batch_sizes == (1, 2, 7)
    assert done.proof.samples > 7
    assert done.scores["int8"]["loss"] != done.scores["fp32"]["loss"]
    assert done.scores["int8"]["loss"] == pytest.approx(done.scores["fp32"]["loss"], rel=0.05)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["cifar10", "pysource context=32"])
def test_the_program_predicts_what_the_run_does(name: str, tmp_path: Path) -> None:
    needs.compiler()
    size, proof = SHIPPED[name].task.batch_size, exported(name, tmp_path)["proof"]
    assert proof["batch_sizes"] == [1, 2, size]
    assert proof["samples"] > size
    assert proof["samples"] % size  # the fourth size is of the last batch
    assert proof["largest_difference"] <= 1e-5
