"""grappe tasks, grappe engines: lists tasks, and the keys of a plan with the engines that support them."""

from __future__ import annotations

import dataclasses

from rich.console import Group
from rich.table import Table

from grappe import engines, fields, tasks
from grappe.plan import Plan


def support() -> list[tuple[str, str, str, list[bool]]]:
    """Returns rows (key, default, meaning, support by each engine) for every key of a plan except `engine`."""
    classes = [engines.find(name) for name in engines.names()]
    meaning = fields.docs(Plan)
    return [
        (field.name, "auto" if field.default is None else str(field.default), meaning[field.name].removesuffix("."),
         [field.name in engine.supported_keys for engine in classes])
        for field in dataclasses.fields(Plan)
        if field.name != "engine"
    ]  # fmt: skip


def plan_table() -> Table:
    """Makes the table of the plan keys and of the engines that support them."""
    names = engines.names()
    table = Table("key", "default", "what it is", *names, box=None, padding=(0, 2, 0, 0))
    for key, default, meaning, able in support():
        table.add_row(key, default.lower(), meaning, *["yes" if supported else "" for supported in able])
    return table


def plan_markdown() -> str:
    """Makes the same table in Markdown, for the guides."""
    names = engines.names()
    lines = ["| key | default | what it is | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for key, default, meaning, able in support():
        cells = " | ".join("yes" if supported else "" for supported in able)
        lines.append(f"| `{key}` | {default.lower()} | {meaning} | {cells} |")
    return "\n".join(lines)


def task_list() -> Table:
    """Makes the table of shipped tasks."""
    table = Table("task", "what it learns", box=None, padding=(0, 2, 0, 0))
    for name in tasks.names():
        table.add_row(name, tasks.describe(tasks.find(name)))
    return table


def task_fields(name: str) -> Group:
    """Describes a task: its docstring, its fields and their defaults."""
    cls = tasks.find(name)
    table = Table("field", "default", box=None, padding=(0, 2, 0, 0))
    for field, default in tasks.defaults(cls).items():
        table.add_row(field, str(default))
    return Group(tasks.describe(cls), table)
