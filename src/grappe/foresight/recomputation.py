"""Recomputation: chooses which units of a model run again in backward, so that a step fits at the least extra time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from grappe.errors import GrappeError, PlanError
from grappe.foresight import partition
from grappe.foresight.devices import REFERENCE, Device, device_named
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import MemoryForecast, composed, memory_forecast
from grappe.foresight.kernels import seconds
from grappe.foresight.memory import GLOO_LATE, NCCL
from grappe.foresight.pipeline_trace import Kind, Pass, orders_of, simulate
from grappe.foresight.trace import BACKWARD, FORWARD, LEFT, ROOT, START, Mark, Trace
from grappe.parallel.activation_checkpointing import seconds_an_operator
from grappe.parallel.pipeline.cut import pipeline_units
from grappe.plan import Plan, recompute_of
from grappe.words import format_bytes, plan_name

LEVELS = ("", "selective", "full", "host")
Waiting = tuple[int, ...]
"""Of each of a process's stages: the microbatches whose backward is yet to come, besides the one that runs."""
State = tuple[int, float, tuple[str, ...]]
"""A choice for the first units: the bytes that they keep, the seconds that they take, their levels."""
STATES = 4096
"""Partial choices that are kept at most. Beyond, the bytes that units keep are rounded up to a STATES-th of the room,
so that what is chosen costs no more than the best choice for a room that is smaller by a STATES-th for each unit."""
CALLER = 1.5  # times as long as in a loop of its own takes Python's part of an operator between others
PARTS = 64  # of what waiting microbatches keep
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
        if self.needs.host:
            return f"{self.price:.0%} more time, and {format_bytes(self.needs.host)} of activations on the host"
        if not self.plan.recompute or (self.price < LEAST_PRICE and not self.short):
            return "no more computing"
        if self.short:
            return "more computing (steps are too short to foresee how much)"
        return f"{self.price:.0%} more computing"

    def in_words(self, asked: Plan, limit: int, reserve: str = "") -> str:
        """Says what was chosen for a plan with memory=, and at what cost.

        Args:
            limit: the bytes that torch may allocate.
            reserve: of which memory they are the rest; "": the plan has them.
        """
        moved = ""
        if self.plan.offload != asked.offload:
            moved = ", and parameters and optimizer state on the host, whose time on the bus is not foreseen"
        return (
            f"memory={asked.memory}: the plan is {plan_name(self.plan)}, foreseen to take {format_bytes(self.peak)} of "
            f"{format_bytes(limit)} that torch may allocate{reserve}, with {self.computing}{moved}"
        )


@dataclasses.dataclass
class _Stage:
    """Units whose forwards follow each other in a process: all of a model, or those of a pipeline's stage."""

    order: list[int]
    """Numbers of the units."""
    keeps: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """By level, of each: bytes that stay from its forward to its backward."""
    costs: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """By level, of each: seconds of both."""
    needs: dict[str, list[dict[Waiting, int]]] = dataclasses.field(default_factory=dict)
    """By level, of each: the most bytes, without what earlier units and waiting microbatches keep."""

    def cheapest(self, room: int, waiting: Sequence[float], most: float) -> tuple[float, tuple[str, ...]] | None:
        """Chooses each unit's level so that no moment takes more than `room` bytes, at the least time; None: none fits.

        Exact, for memory and time that add up over units: goes through the units in the order of their forwards, and
        keeps each partial choice that no other one beats in both the bytes that its units keep and its time.

        Args:
            waiting: bytes that each waiting microbatch keeps, by the process's stages.
            most: bytes that all units may keep.
        """
        states: list[State] = [(0, 0.0, ())]
        for place in range(len(self.order)):
            following = list[State]()
            for level in self.keeps:
                needs = self.needs[level][place].items()
                free = room - max(need + sum(map(operator.mul, numbers, waiting)) for numbers, need in needs)
                for kept, cost, levels in states:
                    total = kept + self.keeps[level][place]
                    if kept <= free and total <= most:
                        following.append((total, cost + self.costs[level][place], (*levels, level)))
            states = _undominated(following, room)
        return min((state[1:] for state in states), default=None)


class Units:
    """The time that each unit of a model takes, and the bytes it keeps, by level of recomputation.

    Args:
        fake_model: made with `records`.
        device: the GPU that the plan trains on; None: not known, or this machine's cores, which run each kernel.
        rate: bytes a second of copies between the GPU and the host; 0: nothing goes there.
    """

    def __init__(
        self, fake_model: FakeModel, plan: Plan, samples: int, device: Device | None, *, gpu: bool, rate: float = 0.0
    ) -> None:
        self._plan, pipelined, model = plan, plan.pipeline > 1, fake_model.plain
        self.levels, self._rate = LEVELS if rate else LEVELS[:-1], rate
        self._device = device or (None if fake_model.runs_kernels else device_named(REFERENCE))
        self.number = len(pipeline_units(fake_model.task, model) if pipelined else fake_model.units(model)) or 1
        """A model without units is one."""
        self._orders: list[list[Pass]] = orders_of(plan) if pipelined else [[("forward", 0, 0)]]
        # What is traced: all microbatches of a pipeline, else one of them.
        self._scale = 1 / plan.microbatches if pipelined else plan.microbatches
        self._stages: list[dict[int, _Stage]] = [{} for _ in self._orders]
        """Of each process that differs."""
        self._seconds = defaultdict[tuple[Kind, int], float](float)
        """Of each pass of a stage without recomputation."""
        part = None
        for level in self.levels:
            several = composed(fake_model, self.plan_of([level] * self.number), samples, gpu=gpu)
            if part is None:  # of domain=, the one that needs most without recomputation
                part = max(range(len(several)), key=lambda number: max(map(max, several[number].by_mark(NCCL))))
            by_mark = several[part].by_mark(NCCL if gpu else GLOO_LATE)
            for place, ((_, trace), most) in enumerate(zip(several[part].traces, by_mark, strict=True)):
                self._read(place, level, trace, most)
        self.step = self._simulated({})
        """Seconds of the passes of a step without recomputation."""
        order = [unit for stages in self._stages for stage in stages.values() for unit in stage.order]
        self.adds_up = sorted(order) == list(range(self.number))
        """Whether each unit is called once."""

    def plan_of(self, levels: Sequence[str]) -> Plan:
        """Returns the plan with a level of recomputation for each unit."""
        return dataclasses.replace(self._plan, recompute=recompute_of(levels), memory="none")

    def price(self, levels: Sequence[str]) -> float:
        """Computes the extra time of a choice, as a part of a step's without any."""
        extra = {
            number: sum(stage.costs[levels[unit]][n] - stage.costs[""][n] for n, unit in enumerate(stage.order))
            for stages in self._stages
            for number, stage in stages.items()
        }
        return self._simulated(extra) / self.step - 1

    def cheapest(self, room: int) -> list[str] | None:
        """Chooses each unit's level as `_Stage.cheapest` does, for each process of a pipeline; None: nothing fits.

        What a waiting microbatch keeps may be each part of what it keeps without recomputation in turn: of one stage
        each PARTS-th, so that at most a PARTS-th of that is left unused for each; of several stages fewer parts.
        """
        chosen = [""] * self.number
        for stages in map(dict.values, self._stages):
            waits = any(any(waiting) for stage in stages for need in stage.needs[""] for waiting in need)
            fitting = list[tuple[float, list[tuple[str, ...]]]]()
            parts = round(PARTS ** (1 / len(stages))) if waits else 1
            for shares in itertools.product(range(1, parts + 1), repeat=len(stages)):
                kept = [sum(stage.keeps[""]) * share / parts for stage, share in zip(stages, shares, strict=True)]
                paths = [stage.cheapest(room, kept, most) for stage, most in zip(stages, kept, strict=True)]
                complete = [path for path in paths if path is not None]
                if len(complete) == len(paths):
                    fitting.append((sum(cost for cost, _ in complete), [levels for _, levels in complete]))
            if not fitting:
                return None
            for stage, levels in zip(stages, min(fitting)[1], strict=True):
                for unit, level in zip(stage.order, levels, strict=True):
                    chosen[unit] = level
        return chosen

    def _simulated(self, extra: Mapping[int, float]) -> float:
        """Computes the seconds of a step, of whose stages each microbatch takes so much longer."""
        last = self._orders[0][-1][0]

        def seconds(kind: Kind, stage: int) -> float:
            return self._seconds[kind, stage] + (extra.get(stage, 0.0) if kind == last else 0.0)

        return simulate(self._orders, seconds, lambda _: 0.0).seconds

    def _read(self, place: int, level: str, trace: Trace, by_mark: Sequence[int]) -> None:
        """Takes in a process's step with one level for all units, and the most bytes up to each of its marks."""
        order, stages, ahead = self._orders[place], self._stages[place], trace.ahead
        times = [self._scale * time for time in self._times(trace)[ahead:]]
        homes, units, starts = _walked(trace.marks[ahead:], order)
        for number in sorted(units):
            stage = stages.setdefault(number, _Stage(units[number]))
            stage.keeps[level] = [after - before for before, after in itertools.pairwise(starts[number])]
            # Copies wait for kernels, and kernels for copies.
            moved = [trace.moved[unit] if level == "host" else 0 for unit in stage.order]
            stage.costs[level] = [self._scale * size / self._rate if size else 0.0 for size in moved]
            stage.needs[level] = [defaultdict[Waiting, int](int) for _ in stage.order]
        if self._device is None:
            for called in trace.operators:
                if called.mark >= ahead and homes[called.mark - ahead].forward:
                    times[called.mark - ahead] += CALLER * self._scale * seconds_an_operator(level)
        kept = [sum(stage.keeps[level]) for stage in stages.values()]
        waiting, now = list[Waiting](), Counter[int]()
        for kind, number, _ in order:
            now[number] -= kind != "forward"
            waiting.append(tuple(now[each] for each in stages))
            now[number] += kind == "forward"
        for home, most, time in zip(homes, by_mark, times, strict=True):
            kind, number, _ = order[home.index]
            stage, waits = stages[number], waiting[home.index]
            needs = stage.needs[level][home.place]
            earlier = sum(stage.keeps[level][: home.place]) + sum(map(operator.mul, waits, kept))
            needs[waits] = max(needs[waits], most - earlier)
            stage.costs[level][home.place] += time
            self._seconds[kind, number] += 0.0 if level else time
        states = partition.RANDOM_STATE * (level in partition.REPEATED)
        for stage in stages.values():
            stage.keeps[level] = [size + states for size in stage.keeps[level]]

    def _times(self, trace: Trace) -> list[float]:
        """Returns the seconds of the operators before each mark."""
        times, threads = [0.0] * len(trace.marks), partition.threads_of(self._plan)
        if self._device is None:
            for mark, _, call in trace.calls:
                times[mark] += seconds(call, threads)
        else:
            for called in trace.operators:
                times[called.mark] += self._device.kernel(called, self._plan.precision)
        return times


class _Home(NamedTuple):
    """Place of a process in its step."""

    index: int
    """Of the pass."""
    place: int
    """Of the unit in its stage; of the next or the last one, outside of units."""
    forward: bool


def _walked(
    marks: Sequence[Mark], order: Sequence[Pass]
) -> tuple[list[_Home], dict[int, list[int]], dict[int, list[int]]]:
    """Follows a process's step through its units.

    Returns:
        What runs before each mark; by stage, its units in the order of their forwards, and the bytes in use when each
        one of them begins first and when the last one has ended.
    """
    units, starts = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    homes, home, begun = list[_Home](), _Home(-1, 0, True), 0
    for mark in marks:
        homes.append(home._replace(index=max(0, home.index)))
        if mark.kind == START:
            kind, stage, _ = order[home.index + 1]
            forward = kind == "forward"
            home, begun = _Home(home.index + 1, 0 if forward else len(units[stage]) - 1, forward), 0
        _, stage, micro = order[home.index]
        ends = mark.kind == LEFT and mark.which == ROOT
        if (mark.kind == FORWARD or ends) and micro == 0:
            starts[stage].append(mark.level)
        if mark.kind == FORWARD:
            units[stage] += [mark.which] if micro == 0 else []
            home, begun = home._replace(place=begun), begun + 1
        elif ends:
            home = home._replace(forward=False)
        elif mark.kind == BACKWARD:
            home = home._replace(place=units[stage].index(mark.which))
    for stage in [stage for stage in units if not units[stage]]:  # of a model as a whole
        units[stage], starts[stage] = [0], [marks[0].level, *starts[stage]]
    return homes, units, starts


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
        raise PlanError(f"the peak of {plan_name(plan)} is not foreseen: leave memory= out, and write recompute")
    return Recomputation(plan=plan, needs=needs, peak=needs.most)


def choices(
    fake_model: FakeModel,
    plan: Plan,
    samples: int,
    limit: int,
    device: Device | None = None,
    *,
    gpu: bool = False,
    rate: float = 0.0,
) -> Iterator[Recomputation]:
    """Yields choices for `plan` whose peaks come ever closer to `limit` bytes, the first ones by their own trace.

    Args:
        fake_model: made with `records`.
        device: as of `Units`, as is rate.
    """
    units, offset, tried = Units(fake_model, plan, samples, device, gpu=gpu, rate=rate), 0, list[list[str]]()

    def traced(levels: Sequence[str]) -> Recomputation:
        choice = _foreseen(fake_model, units.plan_of(levels), samples, gpu=gpu)
        return dataclasses.replace(choice, price=units.price(levels), short=not gpu and units.step < SHORTEST)

    for _ in range(TRIES if units.adds_up else 0):
        levels = units.cheapest(limit - offset)
        if levels is None or levels in tried:
            break
        tried.append(levels)
        chosen = traced(levels)
        yield chosen
        if chosen.peak <= limit:
            break
        offset += chosen.peak - limit
    yield from (traced([level] * units.number) for level in units.levels)


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
    rate: float = 0.0,
    earlier: Plan | None = None,
) -> Recomputation:
    """Chooses the recomputation of least time under which a step of `plan` fits; where none does, more microbatches.

    More microbatches come last, since sums in another order have other bits; and after them, on a GPU, parameters and
    optimizer state on the host, which cross the bus in every step.

    Args:
        limit: the bytes that torch may allocate on the process's device.
        host: the bytes of the host's memory that the process may have.
        rate: as of `Units`.
        fits: what else decides whether a plan fits.
        earlier: a plan that is taken, without a price, if it fits.

    Raises:
        PlanError: none fits, or the plan's memory is not foreseen; the message has the smallest change that would.
    """
    base, nearest = dataclasses.replace(plan, memory="none"), list[Recomputation]()

    def fit(choice: Recomputation) -> bool:
        return choice.peak <= limit and choice.needs.host <= host and (fits is None or bool(fits(choice.needs)))

    if earlier is not None and fit(kept := _foreseen(fake_model, earlier, samples, gpu=gpu)):
        return kept

    def starts() -> Iterator[Plan]:
        yield base
        alone = base.offload == "none" and base.replicate * base.pipeline == 1
        if gpu and alone and nearest[0].needs.states.total <= host:
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
            for level in (True, "host") if rate else (True,):
                nearest.append(_foreseen(fake_model, dataclasses.replace(more, recompute=level), samples, gpu=gpu))
            away = rate if nearest[-1].needs.host <= host else 0.0
            if any(map(fit, nearest[-2 if rate else -1 :])):
                good = filter(fit, choices(fake_model, more, samples, limit, device, gpu=gpu, rate=away))
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
