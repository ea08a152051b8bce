"""Check of the site's storage: whether runs, data and caches lie where the site wants them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grappe import sites
from grappe.sites.advice import misplaced
from grappe.sites.schema import Site
from grappe.verbs.doctor.checks import Finding, Level, Machine

CACHES = {"XDG_CACHE_HOME": ".cache", "HF_HOME": ".cache/huggingface", "TORCH_HOME": ".cache/torch"}
"""Variables that say where caches lie, and the folders in HOME without them."""


def check(machine: Machine) -> Iterator[Finding]:
    """Judges the run's folder, the data's and the caches', on the first process."""
    if machine.process.rank:
        return
    yield from of_site(sites.find(sites.current(machine.environment)), machine)


def of_site(site: Site, machine: Machine) -> Iterator[Finding]:
    """Returns findings for folders in a storage of the site that is not meant for what they hold."""
    environment = machine.environment
    if why := misplaced(site, "runs", machine.folder, environment):
        yield _finding("warning", why)
    data = environment.get("GRAPPE_DATA")
    if data and (why := misplaced(site, "data", Path(data).absolute(), environment)):
        yield _finding("warning", why)
    for name, within in CACHES.items():
        folder = Path(environment.get(name) or Path(environment.get("HOME") or "/") / within)
        if folder.is_dir() and (why := misplaced(site, "caches", folder, environment)):
            yield _finding("note", why)
            return


def _finding(level: Level, sentence: str) -> Finding:
    """Splits a sentence of `misplaced` into what, why and do."""
    what, _, rest = sentence.partition(": ")
    why, _, do = rest.rpartition(": ")
    return Finding(level=level, what=what, why=why, do=do)
