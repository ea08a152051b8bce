"""Sites' files against a table of facts with their sources: no figure is without a source or a mark."""

import dataclasses
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grappe import sites
from grappe.errors import UsageError
from grappe.sites.schema import Site
from grappe.verbs.catalogue import described_facts

FACTS = tomllib.loads(Path(__file__).with_name("facts.toml").read_text())
PARTS = ("node", "ask", "charge", "job")


def facts_of(site: Site, table: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, value in the table, value in the site's file)."""
    for part in PARTS:
        for key, value in table.get(part, {}).items():
            found = getattr(getattr(site, part), key)
            yield f"{part}.{key}", value, list(found) if isinstance(found, tuple) else found
    queues = {queue.name: [queue.max_hours, queue.max_gpus or 0, queue.max_nodes or 0] for queue in site.queue}
    for name, value in table.get("queue", {}).items():
        yield f"queue.{name}", value, queues[name]
    slices = {part.name: [part.gpu_gb, part.charge, part.cores, part.memory_gb] for part in site.slice}
    assert len(slices) == len(table.get("slice", {}))
    for profile, value in table.get("slice", {}).items():
        (name,) = (name for name in slices if name.endswith(f"_{profile}"))
        yield f"slice.{name}", value, slices[name]
    if "purge_days" in table:
        places = ("$SCRATCH", "/scratch")
        (scratch,) = (storage for storage in site.storage if storage.place in places)
        yield f"storage.{scratch.place}", table["purge_days"], scratch.purge_days or 0


@pytest.mark.parametrize("name", FACTS)
def test_a_sites_file_has_the_facts(name: str) -> None:
    assert FACTS[name]["source"]
    for key, fact, value in facts_of(sites.find(name), FACTS[name]):
        assert value == fact, f"{name}: {key}"


def figures(site: Site) -> Iterator[str]:
    """Yields the key of each of a site's figures, but for those of storage, which has its own source."""
    for part in ("node", "ask", "charge"):
        table = getattr(site, part)
        for key, value in dataclasses.asdict(table).items() if table else ():
            numeric = isinstance(value, int | float) and not isinstance(value, bool) and key != "default_minutes"
            if (numeric or key == "max_gpus_of") and value:
                yield f"{part}.{key}"
    yield from (f"{part}.{row.name}" for part in ("queue", "slice") for row in getattr(site, part))


@pytest.mark.parametrize("name", [name for name in sites.files() if not sites.find(name).retired and name != "generic"])
def test_each_figure_has_a_source_or_says_that_it_has_none(name: str) -> None:
    site, table = sites.find(name), FACTS.get(name, {})
    sourced = {key for key, *_ in facts_of(site, table)} if table else set()
    generation = {"node.capability"}  # the GPU's own
    for key in figures(site):
        marked = any(f"{key}.".startswith(f"{fact}.") for fact in site.unconfirmed)
        assert marked or key in sourced | generation, f"{name}: {key} is in neither"


@pytest.mark.parametrize("name", sites.files())
def test_each_mark_is_of_a_fact_that_is_shown(name: str) -> None:
    site = sites.find(name)
    shown = {key: source for key, _, source in described_facts(site)}
    for fact, why in site.unconfirmed.items():
        marked = [source for key, source in shown.items() if f"{key}.".startswith(f"{fact}.")]
        assert marked and any(source == f"UNCONFIRMED, {why}" for source in marked), f"{name}: {fact}"
    for fact in site.sources:
        assert any(f"{key}.".startswith(f"{fact}.") for key in shown), f"{name}: {fact}"


@pytest.mark.parametrize(("name", "successor"), [("beluga", "rorqual"), ("cedar", "fir"), ("graham", "nibi")])
def test_a_retired_site_names_its_successor(name: str, successor: str) -> None:
    with pytest.raises(
        UsageError, match=rf"{name} is retired: .*its successor is {successor}\. There is: grappe sites"
    ):
        sites.find(name, retired=False)
    assert sites.current({"CC_CLUSTER": name}) == name
