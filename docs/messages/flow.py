"""Finds the strings of the sources that reach a user as messages: what is raised or complained, and its parts."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from docs.messages.templates import Resolve, is_text, templates

from grappe.language.catalogue import NAME

ERRORS = {
    "ComputedWrongly",
    "DataError",
    "DataNotFound",
    "DivergedError",
    "GrappeError",
    "OutOfMemory",
    "PlanError",
    "ProcessDied",
    "RunError",
    "TaskError",
    "UsageError",
}
SAYING = {"complain", "progress", "waiting", "_note", "note", "begun", "Report", "say", "print", "lines", "show"}
SAYING |= {"add_row", "show_either", "fact_table", "filled_table", "plain_table", "show_facts", "PartRule", "Remedy"}
"""Functions whose text is shown."""
NAMING = {"fact_table", "filled_table", "plain_table", "show_facts", "translated_name"}
"""Functions that are given the names of a table's columns or rows."""
REASONS = {
    "advice",
    "caveats",
    "failure",
    "hint",
    "message",
    "missing",
    "notes",
    "problem",
    "reason",
    "reasons",
    "refused",
}
REASONS |= {"_unsaved", "chosen", "remarks", "unchecked", "time_note", "unsaved", "whose", "why"}
"""Attributes that hold a part of a message, wherever they are set."""
RESULTS = ("cli/application.py", "contrib/slurm/script")
"""Files that make the help, and scripts: of these, only what is raised counts."""
PATTERNS = ("remedies.py",)
"""Files of patterns of what others say; docs/messages/others.py has the remedies."""
NOT_SHOWN = re.compile(
    r"^https://|^_[A-Za-z]|^\"{3}\{|^(?:drawn|torch\.tensor)\(|\[\^|\\[AdwsSZ.]"
    r"|^(?:Metadata-Version|Requires-Dist|No module named|no such option|WeightsUnpickler)"
    r"|^(?:accounting/qos policy|contact slurm|more processors requested|node configuration|node count|time limit)"
    r"|^\n    cluster-constraint|\(\?[<:=!]|^(?:Broken pipe|(?:closed|reset) by peer)$"
)
"""Words by which grappe recognises what others say, private names, and addresses."""
COMMON = {"append", "decode", "format", "get", "items", "join", "name", "open", "read", "replace", "split", "strip"}
COMMON |= {"str", "repr", "len", "sorted", "map", "list", "dict", "set", "tuple", "type", "next", "min", "max", "sum"}
COMMON |= {"keys", "values", "table", "add", "main", "run", "write", "__init__", "text", "line", "path", "show", "find"}
"""Names of so many functions that a call says nothing about the one that is meant."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Program:
    """All modules of a package: which string expressions can reach an expression.

    Args:
        package: the package's folder.
    """

    def __init__(self, package: Path) -> None:
        self.found: dict[str, set[str]] = {}
        """The files of each template."""
        self._package = package
        self._trees: list[ast.Module] = []  # kept: their nodes are known by id()
        self._file: dict[int, str] = {}
        self._constants: dict[tuple[str, str], ast.expr] = {}
        self._imports: dict[tuple[str, str], tuple[str, str]] = {}
        self._functions: dict[str, list[Function]] = {}
        self._function_of: dict[int, Function | None] = {}
        self._calls: dict[str, list[ast.Call]] = {}
        self._set: dict[str, list[ast.expr]] = {}
        self._seen: set[int] = set()
        seeds: list[ast.expr] = []
        for file in sorted(package.rglob("*.py")):
            if file.name not in PATTERNS:
                seeds += self._read(file)
        for name, file in [pair for call in NAMING for pair in self._names_given(call)]:
            self.found.setdefault(NAME.format(name), set()).add(file)
        self._direct = set(map(id, seeds))
        while seeds:
            seeds = [more for seed in seeds for more in self._collect(seed)]

    def _read(self, file: Path) -> Iterator[ast.expr]:
        """Enters a module into the tables; yields what it shows to the user."""
        tree = ast.parse(file.read_text())
        self._trees.append(tree)
        name = str(file.relative_to(self._package.parent))
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self._constants |= {(name, one.id): node.value for one in targets if isinstance(one, ast.Name)}
        yield from self._walk(tree, name, None)

    def _walk(self, node: ast.AST, file: str, function: Function | None) -> Iterator[ast.expr]:
        for child in ast.iter_child_nodes(node):
            self._file[id(child)], self._function_of[id(child)] = file, function
            if isinstance(child, Function):
                self._functions.setdefault(child.name, []).append(child)
                yield from self._walk(child, file, child)
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("grappe"):
                for one in child.names:
                    self._imports[file, one.asname or one.name] = (str(child.module), one.name)
            elif isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
                yield from child.exc.args
            elif isinstance(child, ast.Call):
                yield from self._called(child)
            elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Attribute):
                self._set.setdefault(child.targets[0].attr, []).append(child.value)
            yield from self._walk(child, file, function)

    def _called(self, call: ast.Call) -> Iterator[ast.expr]:
        name = called(call)
        self._calls.setdefault(name, []).append(call)
        for one in call.keywords:
            if one.arg is not None:
                self._set.setdefault(one.arg, []).append(one.value)
        match call:
            case ast.Call(func=ast.Name(id="count_of"), args=[_, ast.Constant(value=str(noun))]):
                for form in (noun, f"{noun}{'es' if noun.endswith('s') else 's'}"):
                    self.found.setdefault(f"{{number}} {form}", set()).add(self._file[id(call)])
        results = self._file[id(call)].removeprefix("grappe/").startswith(RESULTS)
        if name in ERRORS or (name in SAYING and not results):
            yield from (*call.args, *(one.value for one in call.keywords))

    def _names_given(self, function: str) -> Iterator[tuple[str, str]]:
        """Yields the names of columns and rows that a function is given, each with its file."""
        todo = [argument for call in self._calls.get(function, ()) for argument in call.args]
        seen = set[int]()
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            match node:
                case ast.Constant(value=str(name)) if re.fullmatch(r"[A-Za-z][\w/-]+", name):  # others are messages
                    yield name, self._file.get(id(node), "")
                case ast.Tuple(elts=[first, _]) if function not in ("filled_table", "plain_table"):
                    todo.append(first)  # a row: its name, and its value
                case ast.Tuple(elts=elements) | ast.List(elts=elements):
                    todo += elements
                case ast.IfExp(body=left, orelse=right) | ast.BinOp(op=ast.Add(), left=left, right=right):
                    todo += [left, right]
                case ast.Starred(value=value):
                    todo.append(value)
                case ast.Name(id=variable):
                    file, within = self._file.get(id(node), ""), self._function_of.get(id(node))
                    constant = self._constant(file, variable)
                    todo += [constant] if constant is not None else []
                    todo += self._local(variable, within) if within is not None else []

    def _collect(self, expression: ast.expr) -> list[ast.expr]:
        """Adds the templates of an expression; returns the expressions that its placeholders take their text from."""
        if id(expression) in self._seen:
            return []
        self._seen.add(id(expression))
        resolve: Resolve = lambda name: self._constant(self._file.get(id(expression), ""), name)  # noqa: E731
        texts, parts = templates(expression, resolve)
        file = self._file.get(id(expression), "")
        if id(expression) in self._direct or not file.removeprefix("grappe/").startswith(RESULTS):
            for text in texts:
                if not is_text(text) or NOT_SHOWN.search(text):
                    continue
                self.found.setdefault(text, set()).add(file)
        return [source for part in parts for source in self._sources(part)]

    def _constant(self, file: str, name: str) -> ast.expr | None:
        """The expression of a module's constant, its own or one that it imports."""
        if (file, name) in self._imports:
            module, name = self._imports[file, name]
            path = module.replace(".", "/")
            file = next((one for one in (f"{path}.py", f"{path}/__init__.py") if (one, name) in self._constants), "")
        return self._constants.get((file, name))

    def _sources(self, part: ast.expr) -> Iterator[ast.expr]:
        """Yields what a placeholder's text may be made of."""
        file, function = self._file.get(id(part), ""), self._function_of.get(id(part))
        if isinstance(part, ast.Name):
            constant = self._constant(file, part.id)
            if constant is not None:
                yield constant
            if function is not None:
                yield from self._local(part.id, function)
            for one in self._functions.get(part.id, ()):  # a function that is handed on
                yield from returned(one) if self._file[id(one)] == file else ()
        elif isinstance(part, ast.Attribute) and part.attr in REASONS:
            yield from self._set.get(part.attr, ())
        elif isinstance(part, ast.Attribute):
            for one in self._functions.get(part.attr, ()):
                properties = any(isinstance(each, ast.Name) and each.id == "property" for each in one.decorator_list)
                yield from returned(one) if properties and one.name not in COMMON else ()
        elif isinstance(part, ast.Call):
            for one in self._called_functions(part, file):
                yield from returned(one)
        for child in ast.iter_child_nodes(part):
            if isinstance(child, ast.expr):
                self._file.setdefault(id(child), file)
                yield child
            elif isinstance(child, ast.keyword | ast.comprehension):
                yield child.value if isinstance(child, ast.keyword) else child.iter

    def _called_functions(self, call: ast.Call, file: str) -> Iterator[Function]:
        """Yields the functions that a call may mean; those of a common name only in the module named before it."""
        functions = self._functions.get(called(call), ())
        if called(call) not in COMMON:
            yield from functions
        elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            imported = ".".join(self._imports.get((file, call.func.value.id), ())).replace(".", "/")
            yield from (one for one in functions if imported and self._file[id(one)] == f"{imported}.py")
        elif isinstance(call.func, ast.Name):
            imported = self._imports.get((file, call.func.id), ("",))[0].replace(".", "/")
            yield from (one for one in functions if self._file[id(one)] == (f"{imported}.py" if imported else file))

    def _local(self, name: str, function: Function) -> Iterator[ast.expr]:
        """Yields what a function's variable or parameter is set to."""
        yield from _settings(function).get(name, ())
        given = function.args
        names = [one.arg for one in (*given.posonlyargs, *given.args)]
        if name not in (*names, *(one.arg for one in given.kwonlyargs)) or function.name in COMMON:
            return
        for call in self._calls.get(function.name, ()):
            yield from (one.value for one in call.keywords if one.arg == name)
            place = names.index(name) - (names[0] == "self") if name in names else len(call.args)
            yield from call.args[place : place + 1]


def names_in(target: ast.expr) -> set[str]:
    """Returns the variables that a target binds."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def called(call: ast.Call) -> str:
    """Returns the name of the function or class that is called."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


@functools.cache
def _settings(function: Function) -> dict[str, list[ast.expr]]:
    """Returns what a function sets each of its variables to, by name."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values.setdefault(name, []).append(value)
            case ast.AugAssign(target=ast.Name(id=name), value=value):
                values.setdefault(name, []).append(value)
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                values.setdefault(name, []).append(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                several = value.elts if isinstance(value, ast.Tuple) else [value] * len(targets)
                for target, one in zip(targets, several, strict=False):
                    for name in names_in(target):
                        values.setdefault(name, []).append(one)
            case ast.For(target=target, iter=value):
                for name in names_in(target):
                    values.setdefault(name, []).append(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value]):
                values.setdefault(name, []).append(value)
    return values


@functools.cache
def returned(function: Function) -> tuple[ast.expr, ...]:
    """Returns what a function returns or yields."""
    results = (node for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom))
    return tuple(node.value for node in results if node.value is not None)
