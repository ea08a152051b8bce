"""Check of the wheelhouse: where a site's jobs take their packages from, as pip is configured here."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from grappe import sites
from grappe.errors import GrappeError
from grappe.launch import command
from grappe.sites.environment import MADE_ON_NODES
from grappe.verbs.doctor.checks import Finding, Machine, note, warning

LINKS = re.compile(r"find-links='([^']*)'")
TORCH = re.compile(r"torch-(\d[\w.]*)")


def check(machine: Machine) -> Iterator[Finding]:
    """Lists the folders of wheels, outside of jobs, on sites whose jobs make their environment of wheels."""
    if machine.job or machine.process.rank:
        return
    site = sites.find(sites.current(machine.environment))
    if site.job.environment not in MADE_ON_NODES:
        return
    try:
        configuration = command.run(sys.executable, "-m", "pip", "config", "list")
    except GrappeError as mistake:
        yield note(f"pip does not say where wheels come from: {mistake}")
        return
    links = [link for text in LINKS.findall(configuration) for link in re.split(r"\s+|\\n", text) if link]
    yield from of_folders(site.name, [*links, *machine.environment.get("PIP_FIND_LINKS", "").split()])


def of_folders(site: str, links: list[str]) -> Iterator[Finding]:
    """Returns findings for the wheelhouse's folders: how many wheels, and torch's versions."""
    folders = [Path(folder) for folder in dict.fromkeys(links) if "://" not in folder]
    there = [folder for folder in folders if folder.is_dir()]
    if not there:
        yield warning(
            f"jobs of {site} are made of wheels, and pip knows of no folder of wheels here",
            why="grappe submit resolves packages on this machine, before the queue",
            do="load the site's Python module first, or give --wheels FOLDER",
        )
        return
    names = [file.name for folder in there for file in folder.glob("*.whl")]
    versions = sorted({match[1] for name in names if (match := TORCH.match(name))})
    torch = f"torch {', '.join(versions[-3:])}" if versions else "no torch"
    yield note(f"wheelhouse: {', '.join(map(str, there))} ({len(names):,} wheels, {torch})")
