"""Tests of the tiers: slow tests are detected by the functions that they use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grappe import train
from tests import commands, tiers
from tests.commands import Command


def helper() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def recursive() -> None:
    recursive()


def through_a_helper() -> None:
    helper()


def by_a_class() -> None:
    Command("true")


def by_a_module() -> None:
    commands.until(lambda: True, "")


def by_the_api() -> None:
    train("digits")


def within() -> None:
    def inner() -> None:
        helper()

    inner()


def plain() -> None:
    assert sys.executable


@pytest.mark.parametrize(
    ("function", "slow"),
    [
        (helper, True),
        (through_a_helper, True),
        (by_a_class, True),
        (by_a_module, True),
        (by_the_api, True),
        (within, True),
        (plain, False),
        (recursive, False),
    ],
)
def test_what_starts_programs_is_slow(function: object, slow: bool) -> None:
    assert tiers._launches(function, set()) == slow


def test_folders_and_files_of_slow_tests_are_not_imported() -> None:
    assert tiers.has_slow_tests_only(tiers.ROOT / "parity" / "test_native.py")
    assert tiers.has_slow_tests_only(tiers.ROOT / "engines" / "test_deepspeed.py")
    assert not tiers.has_slow_tests_only(tiers.ROOT / "data" / "test_loader.py")
    assert not tiers.has_slow_tests_only(tiers.ROOT)


def test_this_is_quick(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("slow") is None
