"""Judges where a job's files lie by a site's storage: quotas, what is removed with age, what jobs may not write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from grappe.sites.schema import Contents, Site, Storage

NAMES: dict[Contents, str] = {
    "runs": "a run's folder, with its checkpoints,",
    "data": "data",
    "caches": "caches",
}
CHANGE: dict[Contents, str] = {
    "runs": "submit from there, or give --run (--base for other commands)",
    "data": "give --data, or export GRAPPE_DATA",
    "caches": "export XDG_CACHE_HOME, HF_HOME and TORCH_HOME",
}


def misplaced(
    site: Site, what: Contents, folder: Path, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Returns why files should not lie in a folder of this site, and where they should; None if nothing is known.

    Args:
        folder: an absolute path.
        environment: the variables by which the places of storage are found.
    """
    storage = storage_of(site, folder, environment)
    if storage is None or what in storage.holds:
        return None
    better = [other for other in site.storage if what in other.holds]
    if not better:
        return None
    return (
        f"{NAMES[what]} in {storage.place} ({described(storage)}): on {site.name} it should lie in "
        f"{' or '.join(other.place for other in better)} ({described(better[0])}): {CHANGE[what]}"
    )


def storage_of(site: Site, folder: Path, environment: Mapping[str, str]) -> Storage | None:
    """Returns the storage that a folder is in: of several, the innermost."""
    inside = []
    for storage in site.storage:
        place = _expanded(storage.place, environment)
        if place is not None and any(folder.is_relative_to(base) for base in (place, place.resolve())):
            inside.append((len(place.parts), storage))
    return max(inside, key=lambda pair: pair[0])[1] if inside else None


def described(storage: Storage) -> str:
    """Formats a storage's limits."""
    parts = [storage.quota] if storage.quota else []
    if storage.purge_days:
        parts.append(f"files are removed after {storage.purge_days} days")
    if storage.read_only:
        parts.append("jobs cannot write there")
    if storage.backup:
        parts.append("backed up")
    return ", ".join(parts) or "no limits known"


def _expanded(place: str, environment: Mapping[str, str]) -> Path | None:
    name, _, rest = place.removeprefix("$").partition("/")
    if not place.startswith("$"):
        return Path(place)
    value = environment.get(name)
    return Path(value) / rest if value and Path(value).is_absolute() else None
