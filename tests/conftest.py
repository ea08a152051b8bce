"""Fixtures that all tests share."""

# ruff: noqa: E402  # garbage is collected again once all tests are: imports alone make a million objects that stay

import atexit
import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

gc.disable()

import torch

from tests import operators as compiled
from tests import tiers
from tests.commands import Command
from tests.processes import Pool
from tests.scheduler import pytest_xdist_make_scheduler  # noqa: F401

pytest_plugins = ["tests.skips", "tests.small_disk", "tests.gpu_stand_in"]
# Compiled once: else each worker rewrites all asserts again, and each process that a test starts compiles grappe.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What grappe keeps in the user's state folder is kept in one of the tests; processes that they start have it, too.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="grappe-state-")
os.environ.pop("XDG_RUNTIME_DIR", None)
os.environ["LC_ALL"] = "C.UTF-8"  # messages are in English, whatever the language of who runs the tests
os.environ.pop("GRAPPE_LANG", None)
# torch's TCPStore asks the DNS for each client's name, and serves nobody meanwhile: a lost question costs 1 s, not 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
torch.set_num_threads(1)  # the same bits and no fights for two cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help=f"a part of the night: {', '.join((*tiers.PARTS, tiers.SOAK))}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = config.option.markexpr
    ignored = "not slow" in asked and tiers.has_slow_tests_only(collection_path)
    ignored |= asked.startswith("artefact") and not tiers.may_have_artefacts(collection_path)
    return True if ignored else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[tiers.COLLECTED] = [item.nodeid for item in items]
    tiers.mark(items)
    tiers.choose(config, items)
    if config.pluginmanager.hasplugin("xdist"):
        tiers.arrange(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own empty folder, in which it works."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands in an empty folder, and ends what is left of them."""
    with contextlib.ExitStack() as started:

        def begin(*words: str, **options: Any) -> Command:
            return started.enter_context(contextlib.closing(Command(*words, **{"cwd": tmp_path, **options})))

        yield begin


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes, started when the first test asks for them."""
    made = Pool(4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def operators() -> None:
    """DeepSpeed's operators, compiled before a pool is asked for what needs them: its calls may take two minutes."""
    pytest.importorskip("deepspeed")
    compiled.build()


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """DeepSpeed's operators, for a cell of its engine."""
    if "deepspeed" in request.node.name and "pool" in request.fixturenames:
        request.getfixturevalue("operators")
