"""Headspace: what waiting for data has cost a training, and what to change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Subset

from grappe.data.arrays import RepeatedDataset
from grappe.data.images.dataset import Images
from grappe.data.loader import BatchLoader
from grappe.data.loading import workers_needed
from grappe.launch.world import World, own_cores
from grappe.profiling.chronometer import StepTimes
from grappe.profiling.phases import IN_A_STEP, LEAST_SECONDS, PHASES, START

WORTH_SAYING = 0.05  # of the time
LARGE = 50_000  # bytes of a picture's file: one of short side 256 has about 20 kB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headspace:
    """Time that a training has waited for samples, in the process that waited longest."""

    waited: float
    """Seconds in steps and evaluations."""
    share: float
    """Share of the training's time without its start."""
    advice: str = ""
    """Advice on what to change; "": the share is small, or the training short."""
    workers: int | None = None
    """Number of data workers; None: another number does not help."""

    @property
    def faster(self) -> float:
        """Computes by how much infinitely fast data would make the training faster: 0.3, at 1.3 times the rate."""
        return self.share / (1 - self.share) if self.share < 1 else math.inf

    def as_json(self) -> dict[str, Any]:
        """Returns the content of a record of the curves, and of run.json."""
        return {
            "waited": round(self.waited, 3),
            "share": round(self.share, 4),
            "faster": round(min(self.faster, 1e9), 4),
            "advice": self.advice,
        }


def headspace(timing: StepTimes, loaders: Sequence[BatchLoader], world: World, *, tuned: bool) -> Headspace:
    """Computes it from a process's times and what its `loaders` waited. Collective.

    Args:
        tuned: whether the quickest way to load was found by measuring.
    """
    waited = sum(loader.waited for loader in loaders)
    seconds = max(1e-9, sum(timing.totals.values()) - timing.totals[PHASES[START]])
    if timing.clock == "device":
        # The host's waits cost nothing while the device has work.
        steps = sum(timing.totals[name] for name in IN_A_STEP)
        idle = timing.means["data"] / (sum(timing.means.values()) or 1.0)
        waited = idle * steps + sum(loader.waited for loader in loaders[1:])
    share, waited = max(world.gather((min(1.0, waited / seconds), waited)))
    is_worth_saying = share >= WORTH_SAYING and seconds >= LEAST_SECONDS
    advice = _advice(share, loaders[0], world, tuned=tuned) if is_worth_saying else ""
    loading = None if tuned or loaders[0].stream is not None else loaders[0].loading
    return Headspace(waited=waited, share=share, advice=advice, workers=None if loading is None else loading.workers)


def _advice(share: float, loader: BatchLoader, world: World, *, tuned: bool) -> str:
    if loader.loading is None:
        return "the samples are in memory, so make `transform` cheaper"
    if loader.stream is not None:
        return "process 0 reads the stream: give fewer bytes a sample, or index it once (grappe.data.Corpus)"
    cores, workers = own_cores(world.process), loader.loading.workers
    needed = workers_needed(share, workers)
    if not tuned and workers < min(needed, cores):
        return f"try workers={min(needed, cores)} in --plan"
    parts = [f"ask for {cores + max(1, needed - workers)} cores for each process"]
    dataset = loader.dataset
    while isinstance(dataset, RepeatedDataset | Subset):
        dataset = dataset.dataset
    if not isinstance(dataset, Images):
        parts.append("store the samples decoded and smaller, or on a disk of the node (grappe data stage)")
    elif dataset.total_bytes() > LARGE * len(dataset):
        parts.append("pack to short side 256 (grappe data pack)")
    return ", or ".join(parts)
