"""Tests of thinned grids: what is left out is covered, and nothing is left out when it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.grid
@pytest.mark.parametrize("plan", ["", "shard=2", "shard=3", "shard=2,zero=1", "shard=3,zero=1"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_product(name, plan):
    pass

@pytest.mark.grid(each=1)
@pytest.mark.parametrize("plan", ["x", "y"])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_values(name, plan):
    pass

@pytest.mark.parametrize("plan", ["x", "y"])
def test_plain(plan):
    pass
"""
DRAWN = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("cell", range(10))
def test_slow(cell):
    pass

@pytest.mark.slow
def test_single():
    pass

@pytest.mark.parametrize("cell", range(10))
def test_quick(cell):
    pass

@pytest.mark.costly
@pytest.mark.parametrize("cell", range(3))
def test_costly(cell):
    pass
"""
COSTLY = """
import pytest

pytestmark = pytest.mark.costly

def test_first():
    pass

def test_second():
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "test_cells.py"
    path.write_text(TESTS)
    return path


def collected(file: Path, *arguments: str, grid: str = "", draw: str = "") -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "tests.grid", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(file.parent), *arguments],
        cwd=file.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GRAPPE_GRID": grid, "GRAPPE_DRAW": draw, "PYTEST_ADDOPTS": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_each_task_meets_each_value_of_each_key_and_every_plan_occurs(file: Path) -> None:
    cells = [name[13:-1].partition("-")[::2] for name in collected(file, file.name) if "product" in name]
    assert len(cells) < 10
    assert {plan for _, plan in cells} == {"", "shard=2", "shard=3", "shard=2,zero=1", "shard=3,zero=1"}
    met = {(name, key) for name, plan in cells for key in plan.split(",")}
    assert met == {(name, key) for name in "ab" for key in ("", "shard=2", "shard=3", "zero=1")}


def test_every_value_occurs(file: Path) -> None:
    cells = [name[12:-1].split("-") for name in collected(file, file.name) if "values" in name]
    assert len(cells) == 3
    assert {name for name, _ in cells} == {"a", "b", "c"}
    assert {plan for _, plan in cells} == {"x", "y"}


def test_tests_without_the_mark_stay(file: Path) -> None:
    assert len([name for name in collected(file, file.name) if "plain" in name]) == 2


@pytest.mark.parametrize("arguments", [["-k", "product"], ["test_cells.py::test_product"]], ids=["k", "named"])
def test_a_test_that_is_asked_for_has_all_its_cells(file: Path, arguments: list[str]) -> None:
    assert len(collected(file, *arguments)) == 10


def test_all_cells_run_in_a_soak(file: Path) -> None:
    assert len(collected(file, file.name, grid="all")) == 18


def test_each_draw_has_a_share_of_the_slow_cells_and_all_quick_ones(tmp_path: Path) -> None:
    (tmp_path / "test_drawn.py").write_text(DRAWN)
    (tmp_path / "test_module.py").write_text(COSTLY)
    names = _kept(tmp_path, [f"commit {number}" for number in range(24)])
    for drawn in names:
        assert len([name for name in drawn if "slow" in name]) == 2
        assert len([name for name in drawn if "quick" in name]) == 10
        assert "test_single" in drawn
        assert len([name for name in drawn if "costly" in name]) in {0, 3}
        assert ("test_first" in drawn) == ("test_second" in drawn)
    assert len(set().union(*names)) == 26  # within 24 commits, each ran


def _kept(folder: Path, seeds: list[str]) -> list[set[str]]:
    """Returns the names that run for each seed."""
    script = f"""
import json, pytest
from tests import grid

class Plugin:
    def pytest_collection_finish(self, session):
        self.items = session.items

plugin = Plugin()
pytest.main(["-qq", "--collect-only", "-W", "ignore", "-p", "no:cacheprovider", "."], [plugin])
print(json.dumps([[item.name for item in grid.draw(plugin.items, seed)] for seed in {seeds!r}]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return [set(names) for names in json.loads(done.stdout.splitlines()[-1])]


def test_a_named_test_is_not_drawn(file: Path) -> None:
    file.write_text(DRAWN)
    assert len(collected(file, "test_cells.py::test_costly", "-W", "ignore", draw="a commit")) == 3


def test_of_what_an_expression_chooses_an_eighth_is_drawn(file: Path) -> None:
    file.write_text(DRAWN)
    chosen = collected(file, "test_cells.py", "-k", "test_slow", "-W", "ignore", draw="a commit")
    assert len(chosen) == 2
    assert len(collected(file, "test_cells.py", "-k", "test_slow", "-W", "ignore")) == 10
