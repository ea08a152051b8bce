"""Imports of a file are read from its text: neighbours are followed, what it can do without is left out."""

from pathlib import Path

import pytest

from grappe.contrib.slurm.packages import package_of, packages_of_file, packages_of_task

MINE = '''
"""import nothing_in_a_docstring"""
import os, os.path
import torch.nn as nn
import grappe
from sklearn.datasets import load_digits
from neighbour import thing
import near.deep
from . import relative
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import only_for_types

try:
    import without_which_it_goes_on
except ImportError:
    without_which_it_goes_on = None
try:
    import needed_all_the_same
except ImportError:
    raise SystemExit("no") from None

def later():
    with open("x") as stream:
        for _ in stream:
            import PIL.Image

match nn:
    case None:
        import in_a_case
'''


def test_a_file_and_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "neighbour.py").write_text("import yaml\nimport mine")
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "deep.py").write_text("import of_a_neighbour")
    others = {"torch", "scikit-learn", "needed_all_the_same", "pillow", "in_a_case", "of_a_neighbour"}
    assert packages_of_file(tmp_path / "mine.py") == sorted({package_of("yaml"), *others})


@pytest.mark.parametrize(("module", "package"), [("sklearn", "scikit-learn"), ("cv2", "opencv-python"), ("x", "x")])
def test_names_of_packages(module: str, package: str) -> None:
    assert package_of(module) == package


def test_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "scikit-learn" in packages_of_task("digits")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import one")
    assert packages_of_task("mine.py:Name") == ["one"]
    assert packages_of_task("mine:Name") == ["one"]
    assert packages_of_task("elsewhere.inside:Name") == ["elsewhere"]


def test_what_is_no_python_is_left_to_whoever_runs_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("this is no python")
    assert packages_of_file(tmp_path / "mine.py") == []
