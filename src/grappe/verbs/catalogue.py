"""grappe tasks, engines, sites, gpus: lists tasks, plan keys and the engines that support them, clusters, GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.table import Table

from grappe import engines, fields, finder, sites
from grappe.errors import UsageError
from grappe.plan import Plan
from grappe.sites.advice import described
from grappe.sites.schema import Node, Site
from grappe.words import filled_table, plain_table


def support() -> list[tuple[str, str, str, list[str]]]:
    """Returns rows (key, default, meaning, engines that support it) for every key of a plan except `engine`."""
    classes = {name: engines.find(name) for name in engines.names()}
    meaning = fields.docs(Plan)
    return [
        (field.name, "auto" if field.default is None else str(field.default), meaning[field.name].removesuffix("."),
         [name for name, engine in classes.items() if field.name in engine.supported_keys])
        for field in dataclasses.fields(Plan)
        if field.name != "engine"
    ]  # fmt: skip


def plan_table() -> Table:
    """Makes the table of the plan keys and of the engines that support them."""
    names = engines.names()
    rows = [
        (key, default.lower(), *("yes" if name in able else "" for name in names), meaning)
        for key, default, meaning, able in support()
    ]
    return filled_table(("key", "default", *names, "what it is"), rows)


def task_list() -> Table:
    """Makes the table of shipped tasks."""
    rows = [(name, finder.describe(finder.find(name))) for name in finder.names()]
    return filled_table(("task", "what it learns"), rows)


def task_fields(name: str) -> Group:
    """Describes a task: its docstring, its fields and their defaults."""
    cls = finder.find(name)
    rows = [(fields.typed_name(field), str(default)) for field, default in finder.defaults(cls).items()]
    return Group(finder.describe(cls), filled_table(("field", "default"), rows))


def site_list() -> Table:
    """Makes the table of all sites."""
    table = plain_table("site", "where", "node", "at most")
    for name in sites.files():
        try:
            site = sites.find(name)
        except UsageError as error:  # one wrong file hides no other
            table.add_row(name, f"cannot be used: {error}", "", "")
            continue
        hours = site.ask.max_hours or max((queue.max_hours or 0 for queue in site.queue), default=0)
        longest = f"{hours:g} h" if hours else ""
        table.add_row(name, site.title, _node(site.node), f"retired: {site.retired}" if site.retired else longest)
    return table


def gpu_list() -> Group:
    """Makes the table of GPUs by their data sheets: memory, rates, power, generation, and the sites that have them."""
    from grappe.foresight.devices import devices

    everywhere: dict[str, list[str]] = {}
    for name in sites.files():
        with contextlib.suppress(UsageError):  # `grappe sites` shows what is wrong with it
            site = sites.find(name)
            if site.node is not None and not site.retired:
                everywhere.setdefault(site.node.gpu, []).append(name)
    sheets = devices()
    precisions = list(dict.fromkeys(precision for device in sheets for precision in device.tflops))
    columns, rows = ("GPU", "generation", "GB", *precisions, "memory", "link", "W", "sites"), []
    for device in sheets:
        cells = [f"{device.tflops[name]:g}" if name in device.tflops else "-" for name in precisions]
        figures = [f"{figure:g}" for figure in (device.bandwidth_gb, device.link_gb, device.watts)]
        has_it = ", ".join(site for name in device.names for site in everywhere.get(name, ()))
        rows.append((device.title, device.generation, device.memory_gb, *cells, *figures, has_it))
    units = f"{precisions[0]} to {precisions[-1]}: peak TFLOP/s without sparsity; memory and link: GB/s"
    return Group(filled_table(columns, rows), f"{units}; from data sheets")


def site_facts(name: str) -> Table:
    """Lists all facts of one site; unconfirmed facts are marked."""
    table = plain_table("fact", "value", "source, if another")
    for row in described_facts(sites.find(name)):
        table.add_row(*row)
    return table


def described_facts(site: Site) -> Iterator[tuple[str, str, str]]:
    """Yields each fact of a site as (key, value, source); the source is "" where it is the site's own."""
    for key, value in _flat("", dataclasses.asdict(site), site):
        if key.partition(".")[0] not in ("sources", "unconfirmed", "name"):
            why = _marked(site.unconfirmed, key)
            yield key, value, f"UNCONFIRMED, {why}" if why else _marked(site.sources, key)


def _marked(marks: Mapping[str, str], key: str) -> str:
    """Returns the mark of a fact, or of the table that contains it."""
    return next((why for fact, why in marks.items() if f"{key}.".startswith(f"{fact}.")), "")


def _flat(path: str, content: Mapping[str, Any], site: Site) -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(f"{path}{key}.", value, site)
        elif path == "" and key in ("queue", "slice"):
            for row in value:
                parts = [
                    f"{part} {_text(it)}" for part, it in row.items() if part != "name" and it not in (None, False, ())
                ]
                yield f"{key}.{row['name']}", ", ".join(parts)
        elif path == "" and key == "note":
            yield from (("note", text) for text in value)
        elif path == "" and key == "storage":
            for storage in site.storage:
                holds = f"for {', '.join(storage.holds)}; " if storage.holds else ""
                yield f"storage.{storage.place}", f"{holds}{described(storage)}"
        elif value not in (None, "", (), []):
            yield f"{path}{key}", _text(value)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _node(node: Node | None) -> str:
    if node is None:
        return "as sinfo says"
    memory = f", {node.memory_gb} GB" if node.memory_gb else ""
    gpus = f"{node.gpus} x {node.gpu}, " if node.gpus else ""
    return f"{gpus}{node.cores} cores{memory}"
