"""Each private name that grappe uses is there in the library that is installed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

from grappe import private_api
from grappe.private_api import PrivateName
from tests.private_api.accesses import accesses

FILES: dict[str, ModuleType] = {
    one.name: importlib.import_module(f"grappe.private_api.{one.name}")
    for one in pkgutil.iter_modules(private_api.__path__)
}
ENTRIES = [entry for file in FILES.values() for entry in file.USED]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.where}.{entry.name}")
def test_the_library_has_it(entry: PrivateName) -> None:
    if importlib.util.find_spec(entry.where.partition(".")[0]) is None:
        pytest.skip(f"{entry.where.partition('.')[0]} is not installed")
    assert has(entry.where, entry.name), f"{entry.where} has no {entry.name} any more: last seen in {entry.versions}"


def has(where: str, name: str) -> bool:
    """Whether a module or class has the attribute, or its source gives it to an object."""
    owner = resolved(where)
    if hasattr(owner, name):
        return True
    if hasattr(owner, "__path__"):  # a package
        return importlib.util.find_spec(f"{where}.{name}") is not None
    return re.search(rf"\b{name}\b", inspect.getsource(owner)) is not None  # type: ignore[arg-type]


def resolved(where: str) -> object:
    """The module or class of a dotted name."""
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError:
        place, _, name = where.rpartition(".")
        return getattr(resolved(place), name)


def test_what_is_gone_is_noticed() -> None:
    assert has("torch.optim.Optimizer", "_optimizer_step_pre_hooks")
    assert not has("torch.optim.Optimizer", "_hooks_of_another_version")
    assert not has("torch.utils", "_tree_of_another_version")


@pytest.mark.parametrize("library", FILES)
def test_the_list_has_all_that_the_file_uses(library: str) -> None:
    file = Path(str(FILES[library].__file__))
    tree = ast.parse(file.read_text())
    assert {access.name for access in accesses(file, tree, set())} == {entry.name for entry in FILES[library].USED}
