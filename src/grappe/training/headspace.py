"""Headspace: what waiting for data has cost a training, and what to change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import Subset

from grappe.data.arrays import Copies
from grappe.data.contention import WORTH
from grappe.data.images.dataset import Images
from grappe.data.loader import BatchLoader
from grappe.data.loading import workers_needed
from grappe.launch.world import World, own_cores
from grappe.profiling.phases import IN_A_STEP, PHASES, START
from grappe.profiling.summary import StepTimes

WORTH_SAYING = 0.05  # of the time
WORTH_NAMING = 0.01
SURE = 0.01  # of the time: a share that is surer than that is said without its error
KNOWN = 0.06  # of the time: a share that is less sure than that is not said
LARGE = 50_000  # bytes of a picture's file: one of short side 256 has about 20 kB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headspace:
    """Time that loading has cost steps and evaluations of a training, in the process that it cost most."""

    waited: float
    """Seconds that were spent waiting for samples."""
    slowed: float | None = 0.0
    """Seconds that steps have lost to threads and data workers beside them; None: it could not be told."""
    share: float
    """Of both, in the training's time without its start."""
    error: float = 0.0
    """Half the width of the 95 % interval of the share, as far as `slowed` is unsure."""
    advice: str = ""
    """Advice on what to change; "": the share is small."""

    @property
    def faster(self) -> float:
        """Computes by how much infinitely fast data would make the training faster: 0.3, at 1.3 times the rate."""
        return self.share / (1 - self.share) if self.share < 1 else math.inf

    def __str__(self) -> str:
        """Says it in a sentence."""
        untold = (
            "; what loading took from the steps beside it could not be told" if self.slowed is None else ""
        )
        if self.share < WORTH_SAYING:
            return f"waiting for samples took {self.waited:.1f} s, {self.share:.1%} of the time{untold}"
        least = "at least " if self.slowed is None else ""
        slowed = self.share * (self.slowed or 0.0) / ((self.waited + (self.slowed or 0.0)) or 1.0)
        beside = f", {slowed:.0%} was lost to loading beside the steps" if slowed >= WORTH_NAMING else ""
        if beside and self.error >= SURE:
            beside += f", give or take {100 * self.error:.0f}"
        return (
            f"with infinitely fast data this run would be {least}{self.faster:.0%} faster "
            f"({self.share - slowed:.0%} of its time went into waiting for samples{beside}{untold}): {self.advice}"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the content of a record of the curves, and of run.json."""
        return {
            "waited": round(self.waited, 3),
            "slowed": None if self.slowed is None else round(self.slowed, 3),
            "share": round(self.share, 4),
            "error": round(self.error, 4),
            "faster": round(min(self.faster, 1e9), 4),
            "advice": self.advice,
        }


def headspace(timing: StepTimes, loaders: Sequence[BatchLoader], world: World, *, tuned: bool) -> Headspace:
    """Computes it from a process's times and what its `loaders` waited, and took from steps. Collective.

    Args:
        tuned: whether the quickest way to load was found by measuring.
    """
    waited = sum(loader.waited for loader in loaders)
    whole = max(1e-9, sum(timing.totals.values()) - timing.totals[PHASES[START]])
    if timing.clock == "device":
        # The host's waits cost nothing while the device has work.
        steps = sum(timing.totals[name] for name in IN_A_STEP)
        idle = timing.means["data"] / (sum(timing.means.values()) or 1.0)
        waited = idle * steps + sum(loader.waited for loader in loaders[1:])
    slowed, error = _slowed(loaders, whole)
    found = world.gather(_Lost(waited / whole, slowed, error, whole))
    most = max(found, key=lambda one: one.waited + (one.slowed or 0.0))
    share = min(1.0, most.waited + (most.slowed or 0.0))
    return Headspace(
        waited=most.waited * most.whole,
        slowed=None if most.slowed is None else most.slowed * most.whole,
        share=share,
        error=most.error,
        advice=_advice(most, loaders[0], world, tuned=tuned) if share >= WORTH_SAYING else "",
    )


class _Lost(NamedTuple):
    """Shares of a process's time."""

    waited: float
    slowed: float | None
    error: float
    whole: float
    """Seconds."""


def _slowed(loaders: Sequence[BatchLoader], whole: float) -> tuple[float | None, float]:
    """Computes the share of the time that steps lost to loading, and its error; None: it could not be told."""
    computed = sum(loader.contention.computed for loader in loaders) / whole
    if computed <= WORTH:
        return 0.0, 0.0
    found = loaders[0].contention.slowdown()
    if found is None or found.error * computed > KNOWN:
        return None, 0.0
    return found.seconds * computed, found.error * computed


def _advice(lost: _Lost, loader: BatchLoader, world: World, *, tuned: bool) -> str:
    if loader.loading is None:
        return "the samples are in memory, so make `transform` cheaper"
    cores, workers = own_cores(world.process), loader.loading.workers
    needed = workers_needed(min(1.0, lost.waited), workers)
    if (lost.slowed or 0.0) > lost.waited:
        parts = [f"ask for {cores + workers} cores for each process"]
        if loader.loading.kind == "threads" and not tuned:  # else they were measured, and slower
            parts.insert(
                0, "try loading=processes, which do not share the interpreter's lock with the training"
            )
    elif not tuned and workers < min(needed, cores):
        parts = [f"use workers={min(needed, cores)}"]
    else:
        parts = [f"ask for {cores + max(1, needed - workers)} cores for each process"]
    images = _images(loader.dataset)
    if images is None:
        parts.append("store the samples decoded and smaller, or on a disk of the node (grappe data stage)")
    elif images.total_bytes() > LARGE * len(images):
        parts.append("pack to short side 256 (grappe data pack)")
    return ", or ".join(parts)


def _images(dataset: Any) -> Images | None:
    while isinstance(dataset, Copies | Subset):
        dataset = dataset.dataset
    return dataset if isinstance(dataset, Images) else None
