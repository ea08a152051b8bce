"""Runs a script whose lengths are the whole batch's: rewrites what counts rows, and asks a handler at each place.

`len(data)`, `data.size(0)` and `data.shape[0]` of a part of a batch are the part's: "[640/60000]" and an accuracy would
be wrong on several processes. Where the number makes a tensor (`rows = x.size(0); torch.zeros(rows)`), it stays the
part's, and each number that is computed with `rows` is asked for by itself.
"""

from __future__ import annotations

import ast
import collections
import copy
import functools
import importlib.machinery
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

from grappe.errors.user_line import is_users_file
from grappe.verbs.launch.request import OR, USED

FUNCTION = "__grappe_length__"
MAKING = frozenset({
    "zeros", "ones", "full", "empty", "eye", "rand", "randn", "randint", "randperm", "normal", "uniform", "choice",
    "permutation", "arange", "range", "linspace", "new_zeros", "new_ones", "new_full", "new_empty", "view", "reshape",
    "expand", "repeat", "tile", "split", "chunk", "narrow", "unflatten", "multinomial",
})  # fmt: skip
"""Functions that make a tensor of so many rows, as classes of tensors and a model's methods do. Others are tried."""
MEASURES: dict[str, Callable[[Any], Any]] = {
    "len": len,
    "size(0)": lambda tensor: tensor.size(0),
    "shape[0]": lambda tensor: tensor.shape[0],
    "numel": lambda tensor: tensor.numel(),
    "nelement": lambda tensor: tensor.nelement(),
    "shape": lambda tensor: tensor.shape,
    "size": lambda tensor: tensor.size(),
    "": lambda number: number,
}
"""Expressions that count a tensor's rows or numbers; "": a name for such a count."""

OF_TENSORS = ("nn", "Module", "Dataset", "IterableDataset", "Function", "Sampler")
"""Names in the bases of classes whose lengths are those of their own tensors."""
Length = Callable[[int, object, str], int]


class ScriptLoader(importlib.machinery.SourceFileLoader):
    """Runs a script as the main program, with functions of its own.

    Args:
        length: asked length(value, tensor, place) for the rows of a tensor; of a name for them, `tensor` is None.
        names: in place of Python's own functions.
    """

    def __init__(self, file: str, length: Length, names: Mapping[str, Any]) -> None:
        super().__init__("__main__", file)
        self._names = {FUNCTION: functools.partial(_counted_for_script, length), "__file__": file, **names}

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the script, and keeps nothing of it on the disk."""
        tree = _Lengths(self.path).visit(ast.parse(self.get_data(self.path), self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        """Runs the script in `module`, and so each module of its own that it imports."""
        plain, names = importlib.machinery.SourceFileLoader.exec_module, self._names

        def exec_imported(loader: importlib.machinery.SourceFileLoader, imported: ModuleType) -> None:
            if type(loader) is importlib.machinery.SourceFileLoader and is_users_file(loader.path):
                imported.__dict__.update({**names, "__file__": loader.path})
                of_script = copy.copy(self)
                of_script.path = loader.path
                plain(of_script, imported)
            else:
                plain(loader, imported)

        module.__dict__.update(names)
        importlib.machinery.SourceFileLoader.exec_module = exec_imported  # type: ignore[method-assign]
        try:
            plain(self, module)
        finally:
            importlib.machinery.SourceFileLoader.exec_module = plain  # type: ignore[method-assign]


def _counted_for_script(length: Length, counted: Any, measure: str, place: str) -> Any:
    """Returns the number that an expression counts, or the shape of a tensor, as the script is told it."""
    value = MEASURES[measure](counted)
    tensor = counted if measure else None
    if isinstance(value, tuple):
        return type(value)((length(value[0], tensor, place), *value[1:])) if value else value  # type: ignore[arg-type]
    return length(value, tensor, place)


class _Lengths(ast.NodeTransformer):
    """Replaces lengths outside of models and datasets, where they are those of their own tensors."""

    def __init__(self, file: str) -> None:
        self._file, self._making = file, set(MAKING)
        self._named: dict[str, str] = {}
        """By a name that stands for a length, within a function: where it is counted."""
        self._counted = set[str]()
        """All these places."""
        self._left = set(OF_TENSORS)
        """Names of classes whose own lengths stay as they are."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        for each in ast.walk(node):
            if isinstance(each, ast.ClassDef) and self._is_left(each):
                self._left.add(each.name)
                self._making |= {method.name for method in each.body if isinstance(method, ast.FunctionDef)}
        return self._scope(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._scope(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node if self._is_left(node) else self.generic_visit(node)

    def _is_left(self, node: ast.ClassDef) -> bool:
        return any(not self._left.isdisjoint(ast.unparse(base).split(".")) for base in node.bases)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        asked = _asked(node)
        if asked is not None:
            return self._replaced(node, *asked)
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in self._making or name.endswith("Tensor"):
            return node
        node.args = [self._shown(each) for each in node.args]
        return self.generic_visit(node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        node.value = self._shown(node.value)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        asked = _asked(node)
        return self.generic_visit(node) if asked is None else self._replaced(node, *asked)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if isinstance(node.targets[0], ast.Tuple):  # rows, columns = data.shape
            node.value = self._shown(node.value)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        made_at = self._named.get(node.id) if isinstance(node.ctx, ast.Load) else None
        return node if made_at is None else self._replaced(node, node, "", made_at)

    def _scope(self, node: ast.Module | ast.FunctionDef) -> ast.AST:
        """Visits a function with the names that stand for lengths in it, and for nothing else."""
        outer, named = self._named, collections.defaultdict[str, list[str]](list)
        stored = collections.Counter[str]()
        for each in _of_scope(node):
            if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
                stored[each.id] += 1
            if isinstance(each, ast.Assign):
                target = each.targets[0]
                asked = _asked(each.value) if isinstance(target, ast.Name) else _shape(each.value)
                first = target.elts[0] if isinstance(target, ast.Tuple) else target
                if asked is not None and isinstance(first, ast.Name):
                    named[first.id].append(self._place(each.value))
        self._named = {name: OR.join(places) + USED for name, places in named.items() if stored[name] == len(places)}
        self._counted.update(*(named[name] for name in self._named))
        visited = self.generic_visit(node)
        self._named = outer
        return visited

    def _shown(self, node: ast.expr) -> ast.expr:
        """Returns an expression, in which a whole shape is replaced."""
        asked = _shape(node)
        return node if asked is None else self._replaced(node, *asked)

    def _replaced(self, node: ast.expr, asked: ast.expr, measure: str, made_at: str = "") -> ast.expr:
        place = self._place(node)
        place = f"{place}{USED}" if place in self._counted else made_at + place
        counted = [asked, ast.Constant(measure), ast.Constant(place)]
        called = ast.Call(ast.Name(FUNCTION, ast.Load()), counted, [])
        return ast.copy_location(called, node)

    def _place(self, node: ast.expr) -> str:
        return f"{self._file}:{node.lineno}:{node.col_offset}"


def _of_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what a function holds, without the functions and classes in it."""
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield each
            yield from _of_scope(each)


def _asked(node: ast.expr) -> tuple[ast.expr, str] | None:
    """Returns what an expression counts, and how; None: it is another expression."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[tensor], keywords=[]):
            return tensor, "len"
        case ast.Call(func=ast.Attribute(value=tensor, attr="size"), args=[ast.Constant(value=0)], keywords=[]):
            return tensor, "size(0)"
        case ast.Subscript(value=ast.Attribute(value=tensor, attr="shape"), slice=ast.Constant(value=0)):
            return tensor, "shape[0]"
        case ast.Call(func=ast.Attribute(value=tensor, attr="numel" | "nelement" as name), args=[], keywords=[]):
            return tensor, name
    return None


def _shape(node: ast.expr) -> tuple[ast.expr, str] | None:
    """Returns the tensor whose whole shape an expression asks for; None: it is another expression."""
    match node:
        case ast.Attribute(value=tensor, attr="shape"):
            return tensor, "shape"
        case ast.Call(func=ast.Attribute(value=tensor, attr="size"), args=[], keywords=[]):
            return tensor, "size"
    return None
