"""Alters the rules of rows one at a time, and counts how many alterations the test of every operator catches.

By hand: `python -m tests.rows.altered_rules [--count 100] [--seed 0]`. An alteration is one change in one place: a
placement or a reduction taken for another, a dimension, divisor or comparison off by one, a condition turned or left
out, a statement dropped. It is caught if a call becomes wrong, is refused, or is gathered where it was split. Only the
calls that run the altered line are tried, those that ran it first, until one catches it.
"""

from __future__ import annotations

import argparse
import ast
import gc
import itertools
import json
import os
import random
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from tests.rows import samples
from tests.rows.every_operator import Turn, judged, turns

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src" / "grappe" / "rows"
FILES = (
    "along", "attention", "draws", "exchange", "functions", "gathered", "layout", "messages", "norms", "own", "plans",
    "rules", "space", "tensor", "views",
)  # fmt: skip
MOST_TURNS = 1500
"""Tried for an alteration, of those that run its line."""
EQUAL = {
    ("plans", "if plan is None:", "always"): "decides anew at each call: slower",
    ("draws", "if not _fill_own(", "always"): "draws all rows, and keeps its own: slower",
    ("tensor", "if version == family.origin_version", "never"): "carries over at each call: slower",
    ("messages", "if now.size == 1:", "never"): "a process alone sends to itself",
    ("rules", "(None, None) if call.name.endswith('_mean') else None", "always the first"): "for one result the first",
    ("rules", "(None, None) if call.name.endswith('_mean') else None", "always the second"): "None is for all results",
    ("rules", "at={'grad_output': placement}", "left out"): "rows lead, and are taken where they are",
    ("plans", "if not empty:", "always"): "writes to no number",
    ("draws", "if local.numel():", "always"): "draws no number",
    ("layout", "size > 1", "another comparison"): "the stride of a dimension of one number",
    ("norms", "at=_samples_at(call, placement)", "left out"): "channels have no dimension of rows anyway",
    ("messages", "total.numel() and (operation != 'sum'", "the other of and, or"): "gathers the terms: slower",
    ("messages", "total.clone() if", "always the second"): "a sum replaces its term",
    ("rules", "if len(bias.shape) == 4 and bias.shape[0] != 1", "never"): "no mask that torch takes",
    ("rules", "PARTIAL", "another name"): "terms are added up before: a message more",
    ("draws", "if all((_is_drawn_singly", "never"): "draws all rows, and keeps its own: slower",
    ("messages", "if total.numel() and NOW.context.size > 1:", "always"): "a message of no number, or to itself",
    ("tensor", "len(types) > 1 and any", "the other of and, or"): "refuses other kinds of tensors: test_tensor.py",
    ("tensor", "if len(types) > 1 and any", "never"): "refuses other kinds of tensors: test_tensor.py",
    ("norms", "5", "one more"): "the argument after the statistics is no tensor",
    ("tensor", "if not self.dim():", "never"): "another error for the same mistake",
}
"""Alterations that change no number, with the reason; by the beginning of what is altered."""
NO_RULES = (
    "_check",
    "_raise_astray",
    "_send",
    "_lines_of_all",
    "_refused",
    "refuse_kinds",
    "even",
    "_words_around",
)
"""Functions whose change gives no wrong number: they name errors, or decide where rows are."""
SWAPPED_NAMES = {"PARTIAL": "None", "amin": "amax", "amax": "amin", "AS_IS": "None", "first": "last", "rank": "size"}
SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NEVER = ("gathered[", "sent[", "seconds", "trace", "dispatched", "messages +=", "_MOST", "perf_counter", "code")
"""Counters, hashes and bounds of caches, which change no result."""


@dataclass(frozen=True, kw_only=True)
class Alteration:
    """One change of one node of a file's syntax tree, which is the `number`-th that can be changed."""

    file: str
    number: int
    line: int
    what: str
    before: str

    def __str__(self) -> str:
        return f"{self.file}.py:{self.line}: {self.before!r} {self.what}"

    def is_equal(self) -> bool:
        """Whether it is known to change no number."""
        return any(
            file == self.file and what == self.what and self.before.startswith(before) for file, before, what in EQUAL
        )

    def source(self) -> str:
        """The file's text with the change."""
        tree = ast.parse((SOURCE / f"{self.file}.py").read_text())
        next(itertools.islice(_nodes(tree), self.number, None)).marked = True
        return ast.unparse(ast.fix_missing_locations(_Change(self.what).visit(tree)))


# ---- Alterations -------------------------------------------------------------------------------------------
def alterations(file: str) -> Iterator[Alteration]:
    """All alterations of a file."""
    tree = ast.parse((SOURCE / f"{file}.py").read_text())
    for number, node in enumerate(_nodes(tree)):
        for what in _changes(node):
            line = getattr(node, "lineno", 0) or node.value.lineno
            before = ast.unparse(node).split("\n")[0][:70]
            yield Alteration(file=file, number=number, line=line, what=what, before=before)


def _nodes(tree: ast.Module) -> Iterator[ast.AST]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name not in NO_RULES:
            yield from _own_nodes(function)


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body, not those of functions in it, of annotations or of errors' texts."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        text = ast.unparse(node)
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and any(each in text for each in NEVER):
            continue
        if isinstance(node, ast.If) and any(each in ast.unparse(node.test) for each in NEVER):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value is not None else []
        else:
            waiting += ast.iter_child_nodes(node)


def _changes(node: ast.AST) -> list[str]:
    kind = type(node)
    if kind is ast.Constant and type(node.value) is int:
        return ["one more"]
    if kind is ast.Constant and type(node.value) is bool:
        return ["the other truth"]
    if kind is ast.Name and isinstance(node.ctx, ast.Load) and node.id in SWAPPED_NAMES:
        return ["another name"]
    if kind is ast.BinOp and type(node.op) in SWAPPED:
        return ["another operation"]
    if kind is ast.Compare and type(node.ops[0]) in SWAPPED:
        return ["another comparison"]
    if kind is ast.BoolOp:
        return ["the other of and, or"]
    if kind is ast.UnaryOp and isinstance(node.op, (ast.Not, ast.USub)):
        return ["not inverted"]
    if kind is ast.IfExp:
        return ["always the first", "always the second"]
    if kind is ast.If:
        return ["never", "always"] if not node.orelse else ["never"]
    if kind in (ast.Expr, ast.AugAssign):
        return ["dropped"]
    if kind is ast.keyword and node.arg in ("results", "at", "constants", "after", "identity", "view"):
        return ["left out"]
    return []


class _Change(ast.NodeTransformer):
    """Changes the node that is marked."""

    def __init__(self, what: str) -> None:
        self.what = what

    def visit(self, node: ast.AST) -> Any:
        if not getattr(node, "marked", False):
            return self.generic_visit(node)
        del node.marked
        return self._new(node)

    def _new(self, node: Any) -> Any:
        match self.what:
            case "one more":
                return ast.Constant(node.value + 1)
            case "the other truth":
                return ast.Constant(not node.value)
            case "another name":
                return ast.parse(SWAPPED_NAMES[node.id], mode="eval").body
            case "another operation" | "the other of and, or":
                node.op = SWAPPED[type(node.op)]()
                return node
            case "another comparison":
                node.ops[0] = SWAPPED[type(node.ops[0])]()
                return node
            case "not inverted":
                return node.operand
            case "always the first":
                return node.body
            case "always the second":
                return node.orelse
            case "never":
                return node.orelse or ast.Pass()
            case "always":
                return node.body
            case "dropped":
                return ast.Pass()
        return None  # a keyword left out


# ---- Which calls run which lines ---------------------------------------------------------------------------
class Lines:
    """Records which lines of the rooms' files a process has run."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()
        self._codes: dict[CodeType, str] = {}

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        file = self._codes.get(code)
        if file is None:
            path = Path(code.co_filename)
            file = self._codes[code] = path.stem if path.parent == SOURCE else ""
        if not file:
            return None

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                self.seen.add((file, frame.f_lineno))
            return line

        self.seen.add((file, frame.f_lineno))
        return line


def traced() -> Any:
    """Runs in a process that shall say which lines each call runs: plans are made anew for each."""
    lines = Lines()
    sys.settrace(lines.trace)
    return lines


class Altered:
    """Finds the altered file instead of the one in the source."""

    def __init__(self, alteration: Alteration) -> None:
        self.name, self.source = f"grappe.rows.{alteration.file}", alteration.source()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self) if name == self.name else None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.__file__ = str(SOURCE / f"{self.name.rpartition('.')[2]}.py")
        exec(compile(self.source, module.__file__, "exec"), vars(module))


# ---- Trying them -------------------------------------------------------------------------------------------
def in_a_fork(function: Any) -> Any:
    """Returns what a function makes in a process of its own; None if it dies."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            with os.fdopen(writing, "w") as answer:
                json.dump(function(), answer)
        except BaseException as error:
            print(f"  {type(error).__name__}: {error}", file=sys.stderr)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def baseline(todo: list[Turn], undefined: frozenset[str]) -> list[tuple[str, list[Any], list[str]]]:
    """The kind of each turn's verdict, the lines that it ran, and what it gathered."""
    return [(verdict.kind, sorted(verdict.seen), verdict.gathered) for verdict in judged(todo, undefined, watch=traced)]


def caught(alteration: Alteration, todo: list[Turn], before: list[Any], undefined: frozenset[str]) -> str:
    """The first turn that is worse, or that gathers more than all turns of its operator did; empty if none is."""
    sys.meta_path.insert(0, Altered(alteration))  # type: ignore[arg-type]
    try:
        import tests.rows.compared  # noqa: F401
    except Exception as error:
        return f"cannot be imported: {type(error).__name__}"
    for verdict, (kind, gathered) in zip(judged(todo, undefined), before, strict=True):
        if verdict.kind != kind:  # split.toml says which are split
            return f"{verdict.call}: {kind} is {verdict.kind}: {verdict.why[:100]}"
        if not set(verdict.gathered) <= gathered:
            return f"{verdict.call}: gathers {set(verdict.gathered) - gathered}"
    return ""


def main() -> None:
    """Prints each alteration, with the call that catches it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--lines", default="/tmp/altered-lines.json", help="where lines that calls run are kept")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    undefined = frozenset(tomllib.loads((HERE / "exceptions.toml").read_text())["undefined"])
    todo = turns(list(samples.calls(4)), asked.draws)
    gc.collect()
    gc.freeze()
    kept = Path(asked.lines)
    if kept.exists():
        first = json.loads(kept.read_text())
    else:
        first = in_a_fork(lambda: baseline(todo, undefined))
        kept.write_text(json.dumps(first))
    assert len(first) == len(todo), "other calls than those whose lines are kept"
    of_line: dict[tuple[str, int], list[int]] = defaultdict(list)
    gathers: dict[str, set[str]] = defaultdict(set)
    for index, (_, lines, gathered) in enumerate(first):
        gathers[todo[index].call.operator].update(gathered)
        for file, line in lines:
            of_line[file, line].append(index)
    every = [each for file in FILES for each in alterations(file)]
    run = [each for each in every if of_line[each.file, each.line] and not each.is_equal()]
    chosen = random.Random(asked.seed).sample(run, min(asked.count, len(run)))
    print(
        f"{len(every)} alterations, {len(run)} of them in lines that calls run, {len(chosen)} chosen; {len(todo)} calls"
    )
    survived = []
    for number, alteration in enumerate(chosen):
        indices = [i for i in of_line[alteration.file, alteration.line] if first[i][0] != "wrong"]
        scripts = [i for i in indices if todo[i].call.operator.startswith("script: ")]
        others = sorted(set(indices) - set(scripts))
        indices = scripts + random.Random(1).sample(others, min(MOST_TURNS, len(others)))
        began = time.time()
        why = in_a_fork(
            lambda a=alteration, tried=indices: caught(
                a, [todo[i] for i in tried], [(first[i][0], gathers[todo[i].call.operator]) for i in tried], undefined
            )
        )
        if why is None:
            why = "the processes died"
        if not why:
            survived.append(alteration)
        print(
            f"{number:3} {alteration} | {len(indices)} calls, {time.time() - began:.0f} s | {why or 'SURVIVED'}",
            flush=True,
        )
    print(f"{len(chosen) - len(survived)} of {len(chosen)} caught")


if __name__ == "__main__":
    main()
