"""Finds private names of other packages in a Python file: attributes, imports, and getattr with a constant."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

STANDARD = {
    "_exit": "os._exit is documented",
    "_getframe": "sys._getframe is documented",
    "_current_frames": "sys._current_frames is documented",
    "_replace": "a named tuple's _replace is documented",
}
OF_TORCH_OBJECTS = frozenset(
    name
    for made in (nn.Module(), torch.optim.SGD([torch.zeros(1)]), torch.zeros(1))
    for name in dir(made)
    if re.match(r"_[^_]", name)
)
"""Private names of modules, optimizers and tensors: foreign even where a class of grappe's has one of the same name."""
BUILTINS = ("getattr", "hasattr", "setattr", "delattr")


class Access(NamedTuple):
    """A private name of another package, in a file."""

    file: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}"


def is_private(name: str) -> bool:
    """One leading underscore; two are Python's own."""
    return re.match(r"_[^_]", name) is not None


def defined(trees: Iterable[ast.Module]) -> set[str]:
    """The names that the files define: functions, classes, variables, and attributes of `self`."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def accesses(file: Path, tree: ast.Module, own: set[str]) -> Iterator[Access]:
    """Private names in the file that are not in `own`, the names which the project defines."""
    for node in ast.walk(tree):
        for name in _private_names(node, own):
            if name not in STANDARD:
                yield Access(file, node.lineno, name)  # type: ignore[attr-defined]


def _private_names(node: ast.AST, own: set[str]) -> Iterator[str]:
    foreign: frozenset[str] | None = OF_TORCH_OBJECTS
    """Names that are another package's, whatever `own` has; None: all."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            names, foreign = [name], frozenset()
        case ast.Attribute(attr=name):
            names = [name]
        case ast.Call(func=ast.Name(id=called), args=[_, ast.Constant(value=str() as name), *_]):
            names = [name] if called in BUILTINS else []
        case ast.Import(names=aliases):
            names, foreign = [part for alias in aliases for part in alias.name.split(".")], None
        case ast.ImportFrom(module=str() as module, names=aliases) if module.split(".")[0] != "grappe":
            names, foreign = [*module.split("."), *(alias.name for alias in aliases)], None
        case _:
            return
    yield from (name for name in names if is_private(name) and (foreign is None or name in foreign or name not in own))
