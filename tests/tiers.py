"""Sorts the tests by what each of them uses, none by hand: which `make quick` leaves out, which run side by side."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = ("faults", "parity", "slurm")
"""Whole trainings, each under many plans."""
LAUNCHERS = {
    "subprocess",
    "grappe",
    "grappe.launch.local",
    "grappe.launch.start",
    "grappe.verbs.train",
    "tests.chromium",
    "tests.commands",
    "tests.slurm.cluster",
    "tests.slurm.jobs",
}
"""Modules that start programs, and processes beside those of the pool."""
ENGINES = re.compile("deepspeed|horovod|lightning")
"""Engines whose libraries take seconds to import, or are compiled."""
ROOT = Path(__file__).parent


def mark(items: list[pytest.Item]) -> None:
    """Marks each test that starts programs, uses another library's engine, or lies in a folder of whole trainings."""
    for item in items:
        if isinstance(item, pytest.Function) and _is_slow(item):
            item.add_marker(pytest.mark.slow)


def has_slow_tests_only(path: Path) -> bool:
    """Whether a file or folder need not even be imported when slow tests are left out."""
    place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path()
    return place.parts[:1] in [(one,) for one in FOLDERS] or bool(ENGINES.search(str(place)))


def arrange(items: list[pytest.Item]) -> None:
    """Keeps each module on one worker, as its tests share what they made; the cluster, which mostly waits, is first."""
    items.sort(key=lambda item: _folders(item)[0] not in ("slurm", *FOLDERS))
    items.sort(key=lambda item: _folders(item)[0] != "slurm")
    for item in items:
        group = "slurm" if _folders(item)[0] == "slurm" else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


def _folders(item: pytest.Item) -> tuple[str, ...]:
    return item.path.relative_to(ROOT).parts


def _is_slow(item: pytest.Function) -> bool:
    if _folders(item)[0] in FOLDERS or ENGINES.search(item.nodeid):
        return True
    fixtures = [one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
    return any(_launches(one, set()) for one in [item.function, *fixtures])


def _launches(function: object, seen: set[object]) -> bool:
    """Whether a function of the tests, or one that it calls, refers to a launcher."""
    if not isinstance(function, types.FunctionType) or function in seen:
        return False
    seen.add(function)
    for value in (function.__globals__.get(name) for name in _names(function.__code__)):
        module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if module in LAUNCHERS:
            return True
        if isinstance(module, str) and module.startswith("tests.") and _launches(value, seen):
            return True
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
