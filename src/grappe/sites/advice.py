"""Judges what suits a site badly: where a job's files lie, by its storage, and a plan's precision, by its GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from grappe.sites.schema import Contents, Site, Storage

AMPERE, VOLTA = (8, 0), (7, 0)
FULL_FP64 = ((6, 0), VOLTA, AMPERE, (9, 0), (10, 0))  # P100, V100, A100, H100, B200
NAMES: dict[Contents, str] = {"runs": "a run's folder, with its checkpoints,", "data": "data", "caches": "caches"}
CHANGE: dict[Contents, str] = {
    "runs": "submit from there, or give --run (--runs for other commands)",
    "data": "give --data, or export GRAPPE_DATA",
    "caches": "export XDG_CACHE_HOME, HF_HOME and TORCH_HOME",
}


def misplaced(site: Site, what: Contents, folder: Path, environment: Mapping[str, str] = os.environ) -> str | None:
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
    """Returns the storage that a folder is in; the innermost where several match."""
    inside = []
    for storage in site.storage:
        name, _, rest = storage.place.removeprefix("$").partition("/")
        value = environment.get(name, "")
        place = Path(value) / rest if storage.place.startswith("$") else Path(storage.place)
        if place.is_absolute() and any(folder.is_relative_to(base) for base in (place, place.resolve())):
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


class UnfitPrecision(NamedTuple):
    """A precision that a GPU has no units for."""

    what: str
    why: str
    do: str


def unfit_precision(precision: str, gpu: str, capability: tuple[int, int] | None) -> UnfitPrecision | None:
    """Returns why a precision gains nothing on a GPU, or costs time; None if it fits.

    Args:
        gpu: the GPU's name, for the message.
        capability: NVIDIA's compute capability; None: unknown, or AMD's.
    """
    if capability is None or precision == "fp32":
        return None
    name = f"precision={precision} on {gpu} (compute capability {capability[0]}.{capability[1]})"
    if precision == "bf16" and capability < AMPERE:
        why = "bf16 arithmetic came with Ampere (8.0): here it is emulated, and slower than fp32"
        do = "use precision=fp16, with loss scaling" if capability >= VOLTA else "use fp32"
    elif precision == "tf32" and capability < AMPERE:
        why = "TF32 came with Ampere (8.0): here matrix products stay in fp32"
        do = "use precision=fp16"
    elif precision == "fp16" and capability < VOLTA:
        why = "tensor cores came with Volta (7.0): fp16 saves memory and hardly any time"
        do = "use fp32"
    elif precision == "fp64" and capability not in FULL_FP64:
        why = "it has few units for double precision: matrix products take 32 to 64 times as long as in fp32"
        do = "use a V100, A100 or H100, or fp32"
    else:
        return None
    return UnfitPrecision(name, why, do)
