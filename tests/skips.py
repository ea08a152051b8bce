"""Turns a skipped test into a failed one where all must run, but for those that skips.toml names with a reason."""

import fnmatch
import functools
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.version import Version

FULL = (2, 9)
"""The first torch that runs all tests."""
VARIABLE = "GRAPPE_NO_SKIPS"
LIST = Path(__file__).with_name("skips.toml")


@functools.cache
def allowed() -> list[str]:
    """Patterns of the tests that may be skipped."""
    return [one["tests"] for one in tomllib.loads(LIST.read_text())["skip"]]


@functools.cache
def beyond_oldest() -> list[tuple[str, str]]:
    """Patterns of the tests that the oldest torch cannot run, with the reason; none on a newer one."""
    if Version(torch.__version__).release >= FULL:
        return []
    return [(one["tests"], one["why"]) for one in tomllib.loads(LIST.read_text())["oldest"]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, why in beyond_oldest():
            if fnmatch.fnmatch(item.nodeid, pattern):
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    return _judged((yield))


def _judged(report: pytest.TestReport | pytest.CollectReport) -> pytest.TestReport | pytest.CollectReport:
    """The same report, as a failure if it is of a skip that is not on the list."""
    expected = hasattr(report, "wasxfail") or any(fnmatch.fnmatch(report.nodeid, one) for one in allowed())
    if report.skipped and not expected and os.environ.get(VARIABLE):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: {reason}; all tests must run here, and {LIST.name} does not name it"
    return report
