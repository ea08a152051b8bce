"""Sorts the tests into three tiers: `make quick`, `make test` and `make nightly`; nothing is drawn.

A test is slow if it starts processes, trains as a whole, or needs another library's engine: found by what it uses.
`make quick` runs the others. Slow tests run in `make test` if `commit.txt` names them (a file, a test, or one of its
cells), else at night, in the part that PARTS gives their folder.

    pytest --collect-only -q -m nightly    # what runs at night only
"""

import functools
import re
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

FOLDERS = (
    "checkpoint/test_foreign.py",
    "checkpoint/test_saver_pieces.py",
    "checkpoint/test_saver.py",
    "cli/test_bad_input.py",
    "cli/test_foreign_text.py",
    "data/images/test_training.py",
    "docs/test_from_a_page.py",
    "docs/test_messages.py",
    "docs/test_pieces.py",
    "extension",
    "faults",
    "foresight/test_peak.py",
    "foresight/test_recomputation.py",
    "foresight/test_search.py",
    "gallery",
    "parallel/test_materialise.py",
    "parallel/test_shard.py",
    "parallel/test_transformers.py",
    "parity",
    "private_api/test_nowhere_else.py",
    "profiling/test_chronometer.py",
    "slurm",
    "tasks/test_coatnet.py",
    "test_notebook.py",
    "test_transformers_guide.py",
    "training/test_average.py",
    "training/test_out_of_memory.py",
    "training/test_saving.py",
    "training/test_training.py",
    "training/test_training_scores.py",
    "training/test_with_optimizer.py",
    "training/watchers/test_loggers.py",
    "verbs/data/test_bench.py",
    "contrib/doctor/test_doctor.py",
    "contrib/export",
    "contrib/lab",
    "contrib/tune/test_disk.py",
    "contrib/tune/test_tune.py",
    "verbs/foresee/test_foresee.py",
    "verbs/foresee/test_measured_step.py",
    "verbs/foresee/test_run_forecast.py",
    "contrib/script",
    "verbs/measure",
    "contrib/slurm/test_automatic_time.py",
    "contrib/slurm/test_forecast.py",
    "contrib/slurm/test_imports.py",
    "verbs/verify",
)
"""Whole trainings, each under many plans, and what takes seconds by itself; a folder or a module."""
ARTEFACTS = ("docs/test_site.py", "labs", "test_demo.py", "test_notebook.py", "test_wheel.py")
"""What is made of the sources: the site in a browser, the wheel, and the labs, notebooks and demo run from it."""
LONG = (
    "launch/test_orphan.py",
    "rows/test_every_operator.py",
    "tasks/test_error_corpus.py",
    "test_benchmarks.py",
    "test_gpu.py",
    "training/test_limits.py",
    "training/test_memory_choice.py",
    "training/test_own_loop.py",
)
"""Modules that take minutes: begun early, since a module stays with one worker, for which the others would wait."""
LAUNCHERS = {
    "benchmarks.cifar_script",
    "benchmarks.commands",
    "benchmarks.compute_alone",
    "benchmarks.pages",
    "benchmarks.rotation",
    "subprocess",
    "grappe",
    "grappe.launch.local",
    "grappe.launch.start",
    "grappe.contrib.slurm.packages",
    "grappe.verbs.train",
    "tests.chromium",
    "tests.commands",
    "tests.slurm.cluster",
    "tests.slurm.jobs",
}
"""Modules that start programs, and processes beside those of the pool."""
ENGINES = re.compile("deepspeed|horovod|lightning")
"""Engines whose libraries take seconds to import, or are compiled."""
CLUSTER = ("slurm",)
ROOT = Path(__file__).parent
COMMIT = frozenset(line for line in (ROOT / "commit.txt").read_text().splitlines() if line and line[0] != "#")
PARTS = {
    "artefacts": ARTEFACTS,
    "parity": ("parity", "gallery", "parallel"),
    "faults": ("faults",),
    "slurm": ("slurm", "sites", "contrib/slurm", "contrib/tune"),
    "verbs": ("verbs", "contrib", "foresight", "optimizers"),
    "rest": ("",),
}
"""Folders of each part of the night: a test belongs to the first part that has its folder."""
COLLECTED = pytest.StashKey[list[str]]()
"""Ids of all tests that were collected, before any is left out."""
SOAK = "soak"
"""The part of what takes minutes by itself, wherever it stands."""


def mark(items: list[pytest.Item]) -> None:
    """Marks slow tests, artefacts, and what runs at night only."""
    for item in items:
        if _is_in(item.path, ARTEFACTS):
            item.add_marker(pytest.mark.artefact)
            item.add_marker(pytest.mark.slow)
        elif isinstance(item, pytest.Function) and _is_slow(item):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not COMMIT.intersection(names(item.nodeid)):
            item.add_marker(pytest.mark.nightly)


def names(nodeid: str) -> tuple[str, str, str]:
    """The file, the test and the cell of a node's id, as lines of `commit.txt`."""
    inside = nodeid.removeprefix("tests/")
    return inside.partition("::")[0], inside.partition("[")[0], inside


def part_of(item: pytest.Item) -> str:
    """The part of the night to which a test belongs."""
    if item.get_closest_marker("soak"):
        return SOAK
    return next(name for name, places in PARTS.items() if _is_in(item.path, places))


def has_slow_tests_only(path: Path) -> bool:
    """Whether a file or folder need not even be imported when slow tests are left out."""
    inside = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
    return _is_in(path, FOLDERS) or bool(ENGINES.search(inside))


def may_have_artefacts(path: Path) -> bool:
    """Whether a file or folder has tests of artefacts, or such a folder inside."""
    return _is_in(path, ARTEFACTS) or any((ROOT / place).is_relative_to(path) for place in ARTEFACTS)


def arrange(items: list[pytest.Item]) -> None:
    """Puts the clusters' tests first, as jobs wait for Slurm; artefacts, trainings, and others that take minutes."""
    for places in (LONG, FOLDERS, ARTEFACTS, CLUSTER):
        items.sort(key=lambda item, places=places: not _is_in(item.path, places))


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what runs at night in the part that `--part` names; all without it."""
    part = config.getoption("--part")
    if part is None:
        return
    if part not in (*PARTS, SOAK):
        raise pytest.UsageError(f"--part: {part} is not one of {', '.join((*PARTS, SOAK))}")
    others = [item for item in items if not _is_nightly(item) or part_of(item) != part]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


def _is_nightly(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("nightly", "artefact", SOAK))


def stale(nodeids: Iterable[str]) -> set[str]:
    """Lines of `commit.txt` that name nothing in the files that were collected."""
    collected = {name for nodeid in nodeids for name in names(nodeid)}
    return {line for line in COMMIT if line.partition("::")[0] in collected and line not in collected}


@functools.cache  # a file has up to a hundred tests
def _is_in(path: Path, places: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(ROOT / place) for place in places)


def _is_slow(item: pytest.Function) -> bool:
    if _is_in(item.path, FOLDERS) or ENGINES.search(item.nodeid) or "pool" in item.fixturenames:
        return True
    definitions = item._fixtureinfo.name2fixturedefs.values()
    fixtures = [fixture.func for overridden in definitions for fixture in overridden]
    return any(_launches(function) for function in [item.function, *fixtures])


@functools.cache
def _launches(function: object) -> bool:
    return _refers_to_launcher(function, set())


def _refers_to_launcher(function: object, seen: set[object]) -> bool:
    """Whether a function of the tests, or one that it calls, refers to a launcher."""
    if not isinstance(function, types.FunctionType) or function in seen:
        return False
    seen.add(function)
    for value in (function.__globals__.get(name) for name in _names(function.__code__)):
        module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if module in LAUNCHERS:
            return True
        if isinstance(module, str) and module.startswith("tests.") and _refers_to_launcher(value, seen):
            return True
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
