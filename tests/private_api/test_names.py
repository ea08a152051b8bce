"""Each private name that grappe uses is there in the library that is installed."""

import ast
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from grappe import private_api
from grappe.errors import UsageError
from grappe.private_api import WARNED, PrivateName, check_torch, has, torch, transformers
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


def test_what_is_gone_is_noticed() -> None:
    assert has("torch.optim.Optimizer", "_optimizer_step_pre_hooks")
    assert not has("torch.optim.Optimizer", "_hooks_of_another_version")
    assert not has("torch.utils", "_tree_of_another_version")


def test_a_torch_that_was_not_tested_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WARNED, "")
    for version in ("2.8.0+cu128", "2.13.0+cpu", "2.15.1"):
        assert check_torch(version, [PrivateName("torch.utils", "_tree_of_another_version", "")]) == ""
    with pytest.raises(UsageError, match=r"torch 2\.7\.1 is too old: grappe needs 2\.8 or newer"):
        check_torch("2.7.1")
    with pytest.raises(UsageError, match=r"2\.17\.0 .* has no torch\.utils\._tree_of_another_version any more"):
        check_torch("2.17.0", [PrivateName("torch.utils", "_tree_of_another_version", "")])
    caution = check_torch("2.17.0a0", torch.USED)
    assert caution.endswith("tested up to torch 2.15, and this is 2.17.0a0: it works if `make quick` does")
    assert check_torch("2.17.0a0", torch.USED) == "", "once"


@pytest.mark.parametrize("library", FILES)
def test_the_list_has_all_that_the_file_uses(library: str) -> None:
    file = Path(str(FILES[library].__file__))
    tree = ast.parse(file.read_text())
    assert {access.name for access in accesses(file, tree, set())} == {entry.name for entry in FILES[library].USED}


def test_transformers_that_another_library_imported_is_not_loaded_for_a_model_of_torch(monkeypatch):
    """Of `PreTrainedModel` the name alone takes a second of imports."""
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    assert transformers.models(nn.Linear(2, 2)) == {}
