"""Lint of docstrings: the first word is a verb or a term."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = frozenset(
    ["What", "How", "Where", "Which", "Who", "When", "Why", "It", "Its", "They", "Their", "That", "If"]
)
# Held in src alone: words before the term that the docstring should open with.
FORBIDDEN_IN_SRC = FORBIDDEN | frozenset(["Of", "Whether", "As", "Once", "After", "Before"])
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(text: str, *, constants: bool = False) -> Iterator[tuple[str, int, str]]:
    """Yields name, line and docstring of a file's modules, classes, functions and documented fields."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Documented) and (found := ast.get_docstring(node)):
            yield getattr(node, "name", "module"), node.body[0].lineno, found
        if isinstance(node, ast.ClassDef) or (constants and isinstance(node, ast.Module)):
            for field, after in itertools.pairwise(node.body):
                if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    if not isinstance(after.value, ast.Constant) or not isinstance(after.value.value, str):
                        continue
                    targets = [field.target] if isinstance(field, ast.AnnAssign) else field.targets
                    name = f"{getattr(node, 'name', 'module')}.{ast.unparse(targets[0])}"
                    yield name, after.lineno, after.value.value


def offenders(text: str, forbidden: frozenset[str]) -> list[str]:
    """Lists docstrings whose first word is forbidden; a field's may be `Whether`."""
    return [
        f"{line} {name}: {docstring.splitlines()[0]}"
        for name, line, docstring in docstrings(text, constants=forbidden is FORBIDDEN_IN_SRC)
        if docstring.split()[0].strip(",:") in forbidden - ({"Whether"} if "." in name else set())
    ]


@pytest.mark.parametrize("folder", ["src", "benchmarks", "docs", "tests"])
def test_docstrings_open_with_a_verb_or_a_term(folder: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{one}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for one in offenders(file.read_text(), FORBIDDEN_IN_SRC if folder == "src" else FORBIDDEN)
    ]
    assert not found, "a docstring opens with a verb or a term:\n" + "\n".join(found)


def test_an_offender_is_named() -> None:
    text = '''
class Plan:
    """How a step is spread."""

    steps: int
    """Whether it is a number."""
    size: int
    """What it holds."""

    def names(self):
        """Returns the names."""


MOST = 3
"""Of plans."""
'''
    expected = ["15 module.MOST: Of plans.", "3 Plan: How a step is spread.", "8 Plan.size: What it holds."]
    assert offenders(text, FORBIDDEN_IN_SRC) == expected
