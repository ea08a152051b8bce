"""Makes the reference of public names from the code: pages of the site; `python -m docs.api` prints them all."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ForwardRef

from docs.generate import plan_keys

import grappe
from grappe import fields
from grappe.cli.commands import app
from grappe.plan import Plan

# Beside grappe itself: each says in __all__ what is public.
MODULES = ("grappe.data", "grappe.data.augment", "grappe.optimizers", "grappe.slurm")
# What public functions return: these attributes are public, the classes are not for importing.
RETURNED = {
    "grappe.training.run:Run": ("folder", "read_description", "is_finished", "checkpoints", "latest", "records"),
    "grappe.step.scores:Scores": (),
    "grappe.contrib.tune.study:Study": ("folder", "search", "trials", "best", "run_folder"),
    "grappe.contrib.tune.study:Trial": (),
    "grappe.verbs.verify.verify:PlanVerdict": (),
    "grappe.contrib.slurm.slurm:Entry": (),
}
MEMBERS = {
    "Images": ("sample", "read", "name", "targets", "classes", "left_out"),
    "Plan": ("processes", "data_parallel", "parse", "check_fits"),
}  # of a class with more than users need
TEXT_FORMS = ("Duration", "Names", "Counts", "Ranks")  # Python has plain values
HEAD = """# Public names

Every name of this page keeps its meaning between two minor versions; a change is announced in the changelog.
**What is not on this page is private**, whatever its name looks like: it may change from one commit to the next.
Generated from the code.

Beside Python, the commands and their options are stable: `grappe COMMAND --help` lists them."""
SECTION = re.compile(r"(Args|Raises|Returns|Yields|Attributes):$")
ENTRY = re.compile(r"    (\*{0,2}\w+): (.*)")


def page() -> str:
    """The page's text."""
    parts = [HEAD, f"The commands: {', '.join(f'`{name}`' for name in commands())}."]
    for module in (grappe, *map(importlib.import_module, MODULES)):
        parts.append(f"## {module.__name__}")
        parts += [entry(f"{module.__name__}.{name}", getattr(module, name)) for name in sorted(module.__all__)]
    parts += ["## Keys of a plan", plan_keys()]
    parts += ["## What functions return", "The attributes are public; the classes are not for importing."]
    for place, names in RETURNED.items():
        module, _, name = place.partition(":")
        parts.append(entry(name, getattr(importlib.import_module(module), name), names, constructor=False))
    return "\n\n".join(parts) + "\n"


def commands() -> list[str]:
    """The commands of the command line."""
    return sorted(name for name in app if not name.startswith("-"))


def entry(title: str, found: Any, only: tuple[str, ...] = (), *, constructor: bool = True) -> str:
    """A function's or class's part of the page.

    Args:
        only: the members to list; none: all that are public.
        constructor: whether users make instances.
    """
    parts = [f"### `{title}`"]
    if constructor and not (inspect.isclass(found) and issubclass(found, Exception)):
        parts.append(code(title.rpartition(".")[2], found))
    parts.append(prose(inspect.getdoc(found) or ""))
    if inspect.isclass(found):
        parts += members(found, only or MEMBERS.get(found.__name__, ()))
    return "\n\n".join(filter(None, parts))


def members(cls: type, only: tuple[str, ...]) -> Iterator[str]:
    """The fields, properties and methods of a class's own."""
    for name in only:
        if not hasattr(cls, name) and f"self.{name}" not in inspect.getsource(cls):
            raise AttributeError(f"{cls.__name__} has no {name}: docs/api.py lists it")
    if dataclasses.is_dataclass(cls) and cls is not Plan:
        texts = fields.docs(cls)
        lines = []
        for field in dataclasses.fields(cls):
            default = "" if field.default is dataclasses.MISSING else f" = {value(field.default)}"
            text = " ".join(texts.get(field.name, "").split())
            lines.append(f"- `{field.name}: {annotation(field.type)}{default}`" + (f": {text}" if text else ""))
        yield "\n".join(lines)
    for name, member in vars(cls).items():
        if name.startswith("_") or (only and name not in only):
            continue
        if isinstance(member, property):
            yield f"#### `.{name}`\n\n{prose(inspect.getdoc(member) or '')}"
        elif isinstance(member, (classmethod, staticmethod)) or inspect.isfunction(member):
            yield f"#### `.{name}()`\n\n{code(name, getattr(cls, name))}\n\n{prose(inspect.getdoc(member) or '')}"


def code(name: str, found: Any) -> str:
    """The signature as a block, on one line if it is short."""
    if inspect.isclass(found) and dataclasses.is_dataclass(found):
        what = "the keys below" if found is Plan else "the fields below"
        return f"```python\n{name}(*, ...)  # a frozen dataclass of {what}\n```"
    signature = inspect.signature(found)
    parts, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        parts.append(spelled(parameter))
        keyword_only |= parameter.kind is parameter.VAR_POSITIONAL
    back = "" if signature.return_annotation in (signature.empty, "None", None) else signature.return_annotation
    arrow = f" -> {annotation(back)}" if back else ""
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"
    return f"```python\n{line}\n```"


def spelled(parameter: inspect.Parameter) -> str:
    """One parameter, its annotation as the source has it."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {value(parameter.default)}"


def value(default: Any) -> str:
    """A default as the source has it."""
    if isinstance(default, Path):
        return f'Path("{default}")'
    return (
        default.__name__
        if isinstance(default, type) or inspect.isfunction(default)
        else repr(default).replace("'", '"')
    )


def annotation(found: Any) -> str:
    """An annotation as the source has it."""
    if isinstance(found, ForwardRef):  # of a NamedTuple's fields
        found = found.__forward_arg__
    text = found if isinstance(found, str) else inspect.formatannotation(found)
    for name in TEXT_FORMS:
        text = re.sub(rf"\b{name}\b", inspect.formatannotation(getattr(fields, name).__origin__), text)
    return text


def prose(text: str) -> str:
    """A docstring with its sections as lists."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if SECTION.match(line):
            inside = True
            lines += [f"**{line.rstrip(':')}**", ""]
        elif inside and (found := ENTRY.match(line)):
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif inside and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            inside = inside and not line.strip()
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
