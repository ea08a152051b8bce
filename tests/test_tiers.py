"""Tests of the tiers: slow tests are detected by the functions that they use."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grappe import train
from tests import tiers
from tests.commands import Command
from tests.planted_faults import faults


def helper() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def recursive() -> None:
    recursive()


def by_a_class() -> None:
    def inner() -> None:
        Command("true")

    inner()


def by_the_api() -> None:
    train("digits")


def plain() -> None:
    assert sys.executable


@pytest.mark.parametrize(
    ("function", "slow"),
    [(helper, True), (by_a_class, True), (by_the_api, True), (plain, False), (recursive, False)],
)
def test_what_starts_programs_is_slow(function: object, slow: bool) -> None:
    assert tiers._launches(function) == slow


def test_folders_and_files_of_slow_tests_are_not_imported() -> None:
    assert tiers.has_slow_tests_only(tiers.ROOT / "parity" / "test_native.py")
    assert tiers.has_slow_tests_only(tiers.ROOT / "engines" / "test_deepspeed.py")
    assert tiers.has_slow_tests_only(tiers.ROOT / "verbs" / "verify" / "test_verify.py")
    assert not tiers.has_slow_tests_only(tiers.ROOT / "verbs")
    assert not tiers.has_slow_tests_only(tiers.ROOT / "data" / "test_loader.py")
    assert not tiers.has_slow_tests_only(tiers.ROOT)


def test_each_line_of_the_commit_list_names_a_test(request: pytest.FixtureRequest) -> None:
    assert not tiers.stale(request.config.stash[tiers.COLLECTED])


def test_a_line_that_names_nothing_is_stale() -> None:
    line = next(line for line in sorted(tiers.COMMIT) if line.endswith("]"))
    file = line.partition("::")[0]
    assert tiers.stale([f"tests/{file}::test_another"]) >= {line}
    assert line not in tiers.stale([f"tests/{line}"])


def test_this_is_quick(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("slow") is None


TWO_TESTS = """
import os
def test_a(): print(os.environ["PYTEST_XDIST_WORKER"], __name__)
def test_b(): test_a()
"""


@pytest.mark.slow
def test_a_module_stays_on_one_worker(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.scheduler import pytest_xdist_make_scheduler\n")
    for module in ("one", "two", "three"):
        (tmp_path / f"test_{module}.py").write_text(TWO_TESTS)
    command = [sys.executable, "-m", "pytest", "-rP", "-p", "no:cacheprovider", "--numprocesses", "2", str(tmp_path)]
    path = os.pathsep.join([str(tiers.ROOT.parent), *sys.path])
    output = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    lines = re.findall(r"^gw. test_\w+$", output.stdout, re.MULTILINE)
    assert len(lines) == 6
    assert len(set(lines)) == 3


def test_each_test_of_a_commit_is_named_once_and_in_order() -> None:
    lines = (tiers.ROOT / "commit.txt").read_text().splitlines()[1:]
    assert lines == sorted(set(lines))


def test_each_planted_fault_is_in_a_line_of_the_source() -> None:
    stale = [each for each in faults() if (tiers.ROOT.parent / each.file).read_text().count(each.before) != 1]
    assert not stale, "choose their lines anew in planted_faults.toml"
