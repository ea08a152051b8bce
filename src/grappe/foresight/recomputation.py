"""Recomputation: chooses which units of a model run again in backward, so that a step fits at the least extra time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from grappe.errors import GrappeError, PlanError
from grappe.foresight import partition
from grappe.foresight.devices import REFERENCE, Device, device_named
from grappe.foresight.fake_model import FakeModel, Part
from grappe.foresight.forecast import AlikeProcesses, MemoryForecast, memory_forecast
from grappe.foresight.kernels import seconds
from grappe.foresight.memory import GLOO_LATE, NCCL
from grappe.foresight.trace import BACKWARD, FORWARD, LEFT, ROOT, Mark, Trace
from grappe.parallel.activation_checkpointing import seconds_in_mode
from grappe.plan import Plan, recompute_of
from grappe.words import format_bytes, plan_name

LEVELS = ("", "selective", "full")
State = tuple[int, float, tuple[str, ...]]
"""A choice for the first units: the bytes that they keep, the seconds that they take, their levels."""
STATES = 4096
"""Partial choices that are kept at most. Beyond, the bytes that units keep are rounded up to a STATES-th of the room,
so that what is chosen costs no more than the best choice for a room that is smaller by a STATES-th for each unit."""
CALLER = 1.5  # times as long as in a loop of its own takes Python's part of an operator between others
TRIES = 4  # of the choice, each corrected by the trace of the one before
LEAST_PRICE = 0.005  # of a step, below which it is called none
SHORTEST = 0.1  # seconds of a step on cores, below which Python's own time, which is not foreseen, spoils its price


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recomputation:
    """A plan that fits, and its cost."""

    plan: Plan
    needs: MemoryForecast
    peak: int
    """Bytes that torch allocates in the process that needs most."""
    price: float = 0.0
    """Extra time of a step over the same plan's without recomputation, as a part of that."""
    short: bool = False
    """Whether steps are too short for that to be foreseen."""

    @property
    def computing(self) -> str:
        """Says what the recomputation costs."""
        if not self.plan.recompute or (self.price < LEAST_PRICE and not self.short):
            return "no more computing"
        if self.short:
            return "more computing (steps are too short to foresee how much)"
        return f"{self.price:.0%} more computing"


class Units:
    """The time that each unit of a model takes, and the bytes it keeps, by level of recomputation; of one microbatch.

    Args:
        fake_model: made with `records`.
        device: the GPU that the plan trains on; None: not known, or this machine's cores, which run each kernel.
    """

    def __init__(self, fake_model: FakeModel, plan: Plan, samples: int, device: Device | None, *, gpu: bool) -> None:
        self.number = len(fake_model.units(fake_model.plain))
        self._plan = plan
        self._device = device or (None if fake_model.runs_kernels else device_named(REFERENCE))
        # Of the processes of domain= the one that needs most without recomputation.
        plain, several = self.plan_of([""]), [Part(number, plan.domain) for number in range(plan.domain)]
        part = max(several, key=lambda each: max(AlikeProcesses(fake_model, plain, samples, each).by_mark(NCCL)))
        composed = {
            level: AlikeProcesses(fake_model, self.plan_of([level] * (self.number or 1)), samples, part, gpu=gpu)
            for level in LEVELS
        }
        traces = {level: processes.traces[0][1] for level, processes in composed.items()}
        times = {level: self._times(trace) for level, trace in traces.items()}
        self.step = plan.microbatches * sum(times[""])
        """Seconds of the microbatches of a step without recomputation."""
        self.keeps: dict[str, list[int]] = {}
        self.costs: dict[str, list[float]] = {}
        self.needs: dict[str, list[int]] = {}
        """Of each unit, in the order of their forwards: the most bytes, without what earlier units keep; with what runs
        outside of the units, which depends on the first one and on the last one."""
        order: list[int] = []
        for level, processes in composed.items():
            marks = traces[level].marks[traces[level].ahead :]
            order, homes, kept = _walked(marks)
            needs, spent = [0] * (len(kept) + 2), [0.0] * (len(kept) + 2)
            for home, most in zip(homes, processes.by_mark(NCCL if gpu else GLOO_LATE), strict=True):
                needs[home] = max(needs[home], most - sum(kept[: max(0, home)]))
            for home, time in zip(homes, times[level][traces[level].ahead :], strict=True):
                spent[home] += time
            if level == "selective" and self._device is None:
                left = next(place for place, mark in enumerate(marks) if mark.kind == LEFT and mark.which == ROOT)
                for operator in traces[level].operators:
                    if 0 <= operator.mark - traces[level].ahead <= left:
                        spent[homes[operator.mark - traces[level].ahead]] += 2 * CALLER * seconds_in_mode()
            kept = [size + bool(level) * partition.RANDOM_STATE for size in kept]
            if kept:
                needs[0] = max(needs[0], needs[-1])
                needs[len(kept) - 1] = max(needs[len(kept) - 1], kept[-1] + needs[len(kept)])
            self.keeps[level], self.needs[level] = kept, needs
            self.costs[level] = [plan.microbatches * time for time in spent]
        self.order = order if sorted(order) == list(range(self.number)) else []
        """The units in the order of their forwards; empty: some are called several times, or not at all."""

    def plan_of(self, levels: Sequence[str]) -> Plan:
        """Returns the plan with a level of recomputation for each unit."""
        return dataclasses.replace(self._plan, recompute=recompute_of(levels), memory="none")

    def price(self, levels: Sequence[str]) -> float:
        """Computes the extra time of a choice, as a part of a step's without any."""
        if not self.order:  # of a model as a whole
            return (sum(self.costs[levels[0]]) - sum(self.costs[""])) / self.step
        extra = (self.costs[levels[unit]][n] - self.costs[""][n] for n, unit in enumerate(self.order))
        return sum(extra) / self.step

    def cheapest(self, room: int) -> list[str] | None:
        """Chooses each unit's level so that no moment takes more than `room` bytes, at the least time; None: none fits.

        Exact, for memory and time that add up over units: goes through the units in the order of their forwards, and
        keeps each partial choice that no other one beats in both the bytes that its units keep and its time.
        """
        states: list[State] = [(0, 0.0, ())]
        for place in range(len(self.order)):
            following = list[State]()
            for kept, cost, levels in states:
                for level in LEVELS:
                    if kept + self.needs[level][place] <= room:
                        total = kept + self.keeps[level][place]
                        following.append((total, cost + self.costs[level][place], (*levels, level)))
            states = _undominated(following, room)
        if not states:
            return None
        chosen = dict(zip(self.order, min(states, key=lambda state: state[1])[2], strict=True))
        return [chosen[unit] for unit in range(self.number)]

    def _times(self, trace: Trace) -> list[float]:
        """Returns the seconds of the operators before each mark."""
        times, threads = [0.0] * len(trace.marks), partition.threads_of(self._plan)
        if self._device is None:
            for mark, _, call in trace.calls:
                times[mark] += seconds(call, threads)
        else:
            for operator in trace.operators:
                times[operator.mark] += self._device.kernel(operator, self._plan.precision)
        return times


def _walked(marks: Sequence[Mark]) -> tuple[list[int], list[int], list[int]]:
    """Follows a step through the units.

    Returns:
        The units in the order of their forwards; for each mark, the place in that order of the unit that runs before
        it, the number of units for what is between the last forward and the first backward, -1 for what is before and
        after all of them; and the bytes that each unit keeps from its forward to the next unit's.
    """
    order = [mark.which for mark in marks if mark.kind == FORWARD]
    place_of = {unit: place for place, unit in enumerate(order)}
    homes, starts, home = [], [], -1
    for mark in marks:
        homes.append(home)
        if mark.kind == FORWARD:
            home = len(starts)
            starts.append(mark.level)
        elif mark.kind == LEFT and mark.which == ROOT:
            home = len(order)
            starts.append(mark.level)
        elif mark.kind == BACKWARD:
            home = place_of[mark.which]
    return order, homes, [after - before for before, after in itertools.pairwise(starts)]


def _undominated(states: list[State], room: int) -> list[State]:
    """Returns the states that no other one beats in both bytes and time; at most STATES, with bytes rounded up."""
    grain = 1
    while True:
        kept = list[State]()
        for size, cost, levels in sorted((-(-size // grain) * grain, cost, levels) for size, cost, levels in states):
            if not kept or cost < kept[-1][1]:
                kept.append((size, cost, levels))
        if len(kept) <= STATES:
            return kept
        grain = max(1, room // STATES)


def _foreseen(fake_model: FakeModel, plan: Plan, samples: int, *, gpu: bool) -> Recomputation:
    needs = memory_forecast(fake_model, plan, batch=samples, gpu=gpu, bounded=True)
    if needs.most is None:
        raise PlanError(f"the peak of {plan_name(plan)} is not foreseen")
    return Recomputation(plan=plan, needs=needs, peak=needs.most)


def choices(
    fake_model: FakeModel, plan: Plan, samples: int, limit: int, device: Device | None = None, *, gpu: bool = False
) -> Iterator[Recomputation]:
    """Yields choices for `plan` whose peaks come ever closer to `limit` bytes, the first ones by their own trace.

    Args:
        fake_model: made with `records`.
        device: as of `Units`.
    """
    units, offset, tried = Units(fake_model, plan, samples, device, gpu=gpu), 0, list[list[str]]()

    def traced(levels: Sequence[str]) -> Recomputation:
        choice = _foreseen(fake_model, units.plan_of(levels), samples, gpu=gpu)
        return dataclasses.replace(choice, price=units.price(levels), short=not gpu and units.step < SHORTEST)

    for _ in range(TRIES if units.order else 0):
        levels = units.cheapest(limit - offset)
        if levels is None or levels in tried:
            break
        tried.append(levels)
        chosen = traced(levels)
        yield chosen
        if chosen.peak <= limit:
            break
        offset += chosen.peak - limit
    yield from (traced([level] * (units.number or 1)) for level in LEVELS)


def fitted(
    fake_model: FakeModel,
    plan: Plan,
    samples: int,
    limit: int,
    device: Device | None = None,
    *,
    gpu: bool = False,
    fits: Callable[[MemoryForecast], bool | None] | None = None,
    host: int = 0,
    earlier: Plan | None = None,
) -> Recomputation:
    """Chooses the recomputation of least time under which a step of `plan` fits; where none does, more microbatches.

    More microbatches come last, since sums in another order have other bits; and after them, on a GPU, parameters and
    optimizer state on the host, which cross the bus in every step.

    Args:
        limit: the bytes that torch may allocate on the process's device.
        host: the bytes of the host's memory that the process may have.
        fits: what else decides whether a plan fits.
        earlier: a plan that is taken, without a price, if it fits.

    Raises:
        PlanError: none fits, or the plan's memory is not foreseen; the message has the smallest change that would.
    """
    base, nearest = dataclasses.replace(plan, memory="none"), list[Recomputation]()

    def fit(choice: Recomputation) -> bool:
        return choice.peak <= limit and (fits is None or bool(fits(choice.needs)))

    if earlier is not None and fit(kept := _foreseen(fake_model, earlier, samples, gpu=gpu)):
        return kept

    def starts() -> Iterator[Plan]:
        yield base
        if gpu and base.offload == "none" and base.replicate == 1 and nearest[0].needs.states.total <= host:
            yield dataclasses.replace(base, offload="cpu")

    for start in starts():
        for more in _more_microbatches(fake_model, start, samples):
            nearest.append(_foreseen(fake_model, more, samples, gpu=gpu))
            if fit(nearest[-1]):
                return nearest[-1]
            if more.offload == "none" and nearest[-1].needs.states.total > limit:  # whatever is recomputed
                least = dataclasses.replace([*_more_microbatches(fake_model, more, samples)][-1], recompute=True)
                nearest.append(_foreseen(fake_model, least, samples, gpu=gpu))
                break
            nearest.append(_foreseen(fake_model, dataclasses.replace(more, recompute=True), samples, gpu=gpu))
            if fit(nearest[-1]):
                good = filter(fit, choices(fake_model, more, samples, limit, device, gpu=gpu))
                return min(good, key=lambda choice: choice.price)
    closest = min(nearest, key=lambda choice: choice.peak)
    change = ""
    for times in (8, 4, 2):
        wider = dataclasses.replace(closest.plan, offload=plan.offload, shard=plan.shard * times)
        with contextlib.suppress(GrappeError):
            if fit(_foreseen(fake_model, wider, samples, gpu=gpu)):
                change = f"; {plan_name(wider)} would fit"
    least = closest.peak
    raise PlanError(
        f"memory={plan.memory}: torch may allocate {format_bytes(limit)} in a process, and the least that is foreseen "
        f"to do is {format_bytes(least)} ({plan_name(closest.plan)}), {format_bytes(least - limit)} more{change}"
    )


def _more_microbatches(fake_model: FakeModel, plan: Plan, samples: int) -> Iterator[Plan]:
    """Yields the plan, then with ever more microbatches; not of a model whose statistics are a microbatch's."""
    rows = partition.largest_rows(fake_model, plan, samples)
    yield plan
    plan = dataclasses.replace(plan, microbatches=2 * plan.microbatches)
    normalised = any(hasattr(module, "track_running_stats") for module in fake_model.plain.modules())
    if not normalised and partition.largest_rows(fake_model, plan, samples) < rows:
        yield from _more_microbatches(fake_model, plan, samples)
