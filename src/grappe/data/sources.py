"""Sources of one BatchLoader: kept between its passes, changed while ways to load are measured, and closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grappe.data.loading import Loading, before_measuring, kinds_of, record, recorded
from grappe.data.shared_memory import is_half_free
from grappe.data.source import Samples, Source, source_of
from grappe.data.threads import Request
from grappe.data.tuning import Spent, Tuner
from grappe.launch.world import World, own_cores
from grappe.plan import Plan

MOST_PER_CORE = 2  # workers: those that wait for a disk need no core


class Sources:
    """Threads and worker processes of a loader, which outlive a pass over the data.

    A pass that is not taken to its end has its source closed; two passes at once have a source each.
    """

    def __init__(self, samples: Samples, plan: Plan, world: World) -> None:
        self.samples = samples
        self._plan, self._cores = plan, own_cores(world.process)
        self._device = world.device.type
        self._kinds = kinds_of(plan, keyed=samples.dataset.keyed is not None)
        self._idle: Source | None = None
        self._busy: list[Source] = []
        self._tuner: Tuner | None = None
        self._note: Callable[[Loading], None] = lambda loading: None
        self.like: Sources | None = None
        """Of another loader: it is loaded as there, from the next pass on, as far as the dataset allows it."""
        self.loading = before_measuring(plan, world.process, self._device)
        self.tuned = False
        """Whether the way to load was found by measuring, by this start or an earlier one."""

    def begin(self, requests: Iterator[Sequence[Request]]) -> Source:
        """Begins to load batches."""
        if self.like is not None:
            self._load_as(self.like.loading)
        source, self._idle = self._idle or source_of(self.samples, self.loading), None
        self._busy.append(source)
        source.begin(requests)
        return source

    def end(self, source: Source, *, exhausted: bool) -> None:
        """Keeps a source for the next pass if all of its batches were taken, else closes it."""
        if source not in self._busy:  # all were closed meanwhile
            return
        self._busy.remove(source)
        if exhausted and self._idle is None:
            self._idle = source
        else:
            source.close()

    def changes(self) -> bool:
        """Counts a step; returns whether the next ones are to be loaded in another way: by a source begun anew."""
        loading = None if self._tuner is None else self._tuner.step()
        if loading is None:
            return False
        if self._tuner is not None and not self._tuner.done:
            self._note(self.loading)  # what works is known if the next way ends the training
        return self._load_as(loading)

    def close(self) -> None:
        """Ends all threads and worker processes."""
        kept = [] if self._idle is None else [self._idle]
        for source in (*self._busy, *kept):
            source.close()
        self._busy.clear()
        self._idle = None

    def tune(self, spent: Spent, earlier_record: object, chosen: Callable[[Mapping[str, Any]], None]) -> None:
        """Finds the quickest way to load during the first steps, where the plan leaves it open.

        Args:
            spent: what steps have cost.
            earlier_record: what an earlier start of the run has found.
            chosen: told what is to be kept with the run.
        """
        asked = self._plan.workers
        if asked == 0 or (asked is not None and len(self._kinds) == 1):
            return
        earlier = recorded(earlier_record, self._kinds, self._cores, self._device)
        if earlier is not None and asked in (None, earlier.workers):
            self._load_as(earlier)
            self.tuned = True
            return

        def noted(loading: Loading) -> None:
            chosen(record(loading, self._cores, self._device))

        def tuned(loading: Loading) -> None:
            self._tuner, self.tuned = None, True
            noted(loading)

        self._note = noted

        self._tuner = Tuner(
            first=self.loading,
            kinds=self._kinds,
            most=asked or MOST_PER_CORE * self._cores,
            spent=spent,
            device=self._device,
            chosen=tuned,
            allowed=lambda loading: loading.kind == "threads" or is_half_free(),
        )

    def _load_as(self, loading: Loading) -> bool:
        if loading.kind not in self._kinds:
            loading = Loading(kind=self._kinds[0], workers=loading.workers)
        if loading == self.loading:
            return False
        self.loading = loading
        if self._idle is not None:
            self._idle.close()
            self._idle = None
        return True
