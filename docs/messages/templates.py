"""Makes message templates of string expressions: `f"there is no {name!r}"` becomes "there is no {name}"."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable

Resolve = Callable[[str], ast.expr | None]
"""Returns the expression of a constant by its name."""
Piece = str | ast.expr
"""Text, or the expression of a placeholder."""

WORD = re.compile(r"[A-Za-z]{3,}")
CODE = re.compile(r"[$]\{\{|\"[$]|^(?:export|set|unset|module|cd|mkdir|conda|command|#|--\S+ \{\w+\}$)|:: |\\A|\(\?:")
SHORT = 14  # characters of a branch that is a part of words: 'sample' or 'samples'
MOST = 12  # templates of one expression


def templates(expression: ast.expr, resolve: Resolve) -> tuple[list[str], list[ast.expr]]:
    """Returns the templates of an expression and the expressions of their placeholders.

    Short branches (`'s' if n != 1 else ''`) are written out, a template for each combination; longer ones are
    placeholders, whose texts are templates of their own.
    """
    forms = _forms(expression, resolve)
    parts = [piece for form in forms for piece in form if not isinstance(piece, str)]
    return [_written(form) for form in forms if any(isinstance(piece, str) for piece in form)], parts


def is_text(template: str) -> bool:
    """Returns whether a template has something to translate: words, and no code alone."""
    text = re.sub(r"\{\w*\}", " ", template)
    return bool(WORD.search(text)) and " " in template.strip() and not CODE.search(template)


def _forms(node: ast.expr, resolve: Resolve) -> list[list[Piece]]:
    match node:
        case ast.Constant(value=str(text)):
            return [[text]]
        case ast.JoinedStr(values=values):
            return _product([_part(value, resolve) for value in values])
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _product([_forms(left, resolve), _forms(right, resolve)])
        case ast.IfExp(body=body, orelse=orelse):
            return [*_forms(body, resolve), *_forms(orelse, resolve)]
        case ast.BoolOp(values=values):
            return [form for value in values for form in _forms(value, resolve)]
        case ast.Name(id=name) if isinstance(constant := resolve(name), ast.Constant | ast.JoinedStr | ast.BinOp):
            found = _forms(constant, resolve)
            return found if isinstance(found[0][0], str) else [[node]]
    return [[node]]


def _part(value: ast.expr, resolve: Resolve) -> list[list[Piece]]:
    """The forms of a part of an f-string."""
    if not isinstance(value, ast.FormattedValue):
        return _forms(value, resolve)
    inner = value.value
    plain = value.conversion == -1 and value.format_spec is None
    match inner:
        case ast.IfExp() if plain:
            forms = _forms(inner, resolve)
            if all(len(form) == 1 and isinstance(form[0], str) and len(form[0]) <= SHORT for form in forms):
                return forms
        case ast.BinOp(op=ast.Mult(), left=ast.Constant(value=str(text))) if plain and len(text) <= SHORT:
            return [[text], [""]]
        case ast.Name() if plain and isinstance(resolve(inner.id), ast.Constant):
            return _forms(inner, resolve)
    return [[inner]]


def _product(parts: list[list[list[Piece]]]) -> list[list[Piece]]:
    found = [[piece for form in one for piece in form] for one in itertools.islice(itertools.product(*parts), MOST)]
    return [_joined(form) for form in found]


def _joined(form: Iterable[Piece]) -> list[Piece]:
    """The pieces, texts that follow each other as one."""
    made: list[Piece] = []
    for piece in form:
        if made and isinstance(piece, str) and isinstance(made[-1], str):
            made[-1] += piece
        else:
            made.append(piece)
    return made


def _written(form: list[Piece]) -> str:
    names: dict[str, str] = {}
    written = ""
    for piece in form:
        if isinstance(piece, str):
            written += piece.replace("{", "{{").replace("}", "}}")
            continue
        text = ast.unparse(piece)
        if text not in names:
            base = _name(piece)
            others = sum(one.rstrip("0123456789") == base for one in names.values())
            names[text] = base if not others else f"{base}{others + 1}"
        written += f"{{{names[text]}}}"
    return written


def _name(node: ast.expr) -> str:
    """A placeholder's name: the last name in its expression that is no builtin or method."""
    match node:
        case ast.Name(id=name):
            return name.strip("_0123456789") or "value"
        case ast.Attribute(attr=attr) if attr not in ("__name__", "name", "value"):
            return attr.strip("_0123456789") or "value"
        case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
            return _name(value)
        case ast.Call(func=ast.Attribute(attr="join" | "strip", value=ast.Constant()), args=[one, *_]):
            return _name(one)
        case ast.Call(func=ast.Name(id="len" | "str" | "repr" | "sorted" | "type" | "map"), args=[*_, one]):
            return _name(one)
        case ast.Call(func=func):
            return _name(func)
        case ast.GeneratorExp(elt=one) | ast.ListComp(elt=one) | ast.UnaryOp(operand=one):
            return _name(one)
        case ast.BinOp(left=left) | ast.IfExp(body=left):
            return _name(left)
        case ast.BoolOp(values=[one, *_]):
            return _name(one)
    return "value"
