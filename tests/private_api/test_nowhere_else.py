"""Private names of other packages stand in grappe/private_api alone."""

import ast
from pathlib import Path

import grappe
from tests.private_api.accesses import Access, accesses, defined

ROOT = Path(grappe.__file__).parent


def found_in(source: str) -> list[str]:
    tree = ast.parse(source)
    return [access.name for access in accesses(Path("a.py"), tree, defined([tree]))]


def test_what_is_private_elsewhere_and_not_ones_own_is_found() -> None:
    assert found_in("import torch\ntorch._foreach_norm(x)") == ["_foreach_norm"]
    assert found_in("from torch.utils._pytree import tree_map") == ["_pytree"]
    assert found_in("from torch.nn.modules.batchnorm import _BatchNorm") == ["_BatchNorm"]
    assert found_in("import torch.distributed._functional_collectives") == ["_functional_collectives"]
    assert found_in("getattr(optimizer, '_opt_called')") == ["_opt_called"]
    assert found_in("class A(Trainer):\n  def b(self):\n    self._signal_connector.c()") == ["_signal_connector"]
    assert found_in("class A:\n  def b(self, module):\n    self._buffers = module._buffers") == ["_buffers"]
    assert found_in("class A:\n  def b(self, other):\n    self._c = other._c") == []
    assert found_in("from grappe.launch.fork import _forked\nos._exit(1)\na.__dict__") == []


def test_private_names_stand_in_private_api() -> None:
    trees = {file: ast.parse(file.read_text()) for file in sorted(ROOT.rglob("*.py"))}
    own = defined(trees.values())
    elsewhere: list[Access] = []
    for file, tree in trees.items():
        if file.parent != ROOT / "private_api":
            elsewhere += accesses(file.relative_to(ROOT), tree, own)
    assert not elsewhere, "private names outside grappe/private_api:\n" + "\n".join(map(str, elsewhere))
