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
from grappe.verbs.doctor.finding import Finding, Machine, note, warning

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
        said = command.run(sys.executable, "-m", "pip", "config", "list")
    except GrappeError as mistake:
        yield note(f"pip does not say where wheels come from: {mistake}")
        return
    links = [one for text in LINKS.findall(said) for one in re.split(r"\s+|\\n", text) if one]
    yield from of_folders(site.name, [*links, *machine.environment.get("PIP_FIND_LINKS", "").split()])


def of_folders(site: str, links: list[str]) -> Iterator[Finding]:
    """Returns findings for the wheelhouse's folders: how many wheels, and torch's versions."""
    folders = [Path(one) for one in dict.fromkeys(links) if "://" not in one]
    there = [one for one in folders if one.is_dir()]
    if not there:
        yield warning(
            f"jobs of {site} are made of wheels, and pip knows of no folder of wheels here",
            "grappe submit resolves packages on this machine, before the queue",
            "load the site's Python module first, or give --wheels FOLDER",
        )
        return
    names = [file.name for one in there for file in one.glob("*.whl")]
    versions = sorted({found[1] for name in names if (found := TORCH.match(name))})
    torch = f"torch {', '.join(versions[-3:])}" if versions else "no torch"
    yield note(f"wheelhouse: {', '.join(map(str, there))} ({len(names):,} wheels, {torch})")
