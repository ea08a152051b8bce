"""Recomputation: chooses which units of a model run again in backward, so that a step fits at little extra time."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from grappe.errors import GrappeError, PlanError
from grappe.foresight import partition
from grappe.foresight.devices import REFERENCE, Device, device_named
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import MemoryForecast, composed, memory_forecast
from grappe.foresight.kernels import seconds
from grappe.foresight.memory import GLOO_LATE, NCCL
from grappe.foresight.pipeline_trace import Kind, Pass, orders_of, simulate
from grappe.foresight.trace import BACKWARD, FORWARD, LEFT, ROOT, START, Trace
from grappe.parallel.activation_checkpointing import seconds_an_operator
from grappe.parallel.pipeline.cut import pipeline_units
from grappe.plan import Plan, recompute_of
from grappe.words import format_bytes, plan_name

LEVELS = ("", "selective", "full", "host")
CALLER = 1.5  # times as long as in a loop of its own takes Python's part of an operator between others
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
        self._fake_model, self._plan, self._samples, self._gpu = fake_model, plan, samples, gpu
        self._device = device or (device_named(REFERENCE) if fake_model.kernels is None else None)
        pipelined, model = plan.pipeline > 1, fake_model.plain
        self.number = len(pipeline_units(fake_model.task, model) if pipelined else fake_model.units(model)) or 1
        """A model without units is one."""
        self.levels = LEVELS if rate else LEVELS[:-1]
        self._orders: list[list[Pass]] = orders_of(plan) if pipelined else [[("forward", 0, 0)]]
        self._stages = {0: 0}
        """By unit, its stage."""
        self._keeps = {level: [0] * self.number for level in self.levels}
        """By level, of each unit: bytes that its forwards leave until the first backward."""
        self._costs = {level: [0.0] * self.number for level in self.levels}
        """By level, of each unit: seconds."""
        self._seconds = defaultdict[tuple[Kind, int], float](float)
        """Seconds of each pass of a stage without recomputation."""
        # A pipeline's trace has all microbatches, any other one of them.
        self._scale = 1 / plan.microbatches if pipelined else plan.microbatches
        for level in self.levels:
            several = composed(fake_model, self.plan_of([level] * self.number), samples, gpu=gpu)
            traces = [trace for _, trace in several[0].traces]
            for order, trace in zip(self._orders, traces, strict=True):
                self._read(order, level, trace)
            if level == "host":  # copies wait for kernels, and kernels for copies
                for unit, moved in enumerate(traces[0].moved):
                    self._costs[level][unit] += self._scale * moved / rate
        self.step = self._simulated({})
        """Seconds of the passes of a step without recomputation."""

    def plan_of(self, levels: Sequence[str]) -> Plan:
        """Returns the plan with a level of recomputation for each unit."""
        return dataclasses.replace(self._plan, recompute=recompute_of(levels), memory="none")

    def choice(self, levels: Sequence[str]) -> Recomputation:
        """Foresees the plan with these levels, and its price."""
        choice = _foreseen(self._fake_model, self.plan_of(levels), self._samples, gpu=self._gpu)
        return dataclasses.replace(choice, price=self.price(levels), short=not self._gpu and self.step < SHORTEST)

    def price(self, levels: Sequence[str]) -> float:
        """Computes the extra time of a choice, as a part of a step's without any."""
        extra = defaultdict[int, float](float)
        for unit, stage in self._stages.items():
            extra[stage] += self._costs[levels[unit]][unit] - self._costs[""][unit]
        return self._simulated(extra) / self.step - 1

    def cheapest(self, limit: int, fits: Callable[[Recomputation], bool]) -> Recomputation:
        """Recomputes units in the order of seconds a byte, as few as fit; recomputing everything does.

        How many is found by bisection, as each choice is traced; for each process of a pipeline by its own steps,
        which are to take at most `limit` bytes. The last of them may do with a level that takes less time.
        """
        levels, copies = [""] * self.number, NCCL if self._gpu else GLOO_LATE

        def enough(levels: Sequence[str], place: int) -> bool:
            if len(self._orders) == 1:
                return fits(self.choice(levels))
            [pipeline] = composed(self._fake_model, self.plan_of(levels), self._samples, gpu=self._gpu)
            return pipeline.steps(copies)[place] <= limit

        for place, order in enumerate(self._orders):
            moves, choices = self._moves({stage for _, stage, _ in order}), [levels]
            for unit, level in moves:
                choices.append([*choices[-1][:unit], level, *choices[-1][unit + 1 :]])
            fewest = bisect.bisect_left(choices, True, key=functools.partial(enough, place=place))
            levels = choices[min(fewest, len(moves))]
            if 0 < fewest <= len(moves):
                last, _ = moves[fewest - 1]
                for level in sorted(self.levels, key=lambda level: self._costs[level][last]):
                    levels[last] = level
                    if enough(levels, place):
                        break
        if fits(choice := self.choice(levels)):
            return choice
        uniform = (self.choice([level] * self.number) for level in self.levels)
        return min(filter(fits, uniform), key=lambda choice: choice.price)

    def _moves(self, stages: Container[int]) -> list[tuple[int, str]]:
        """Returns the units of some stages with the levels that free bytes, those that cost least a byte first."""
        moves = list[tuple[float, int, str]]()
        for unit in (unit for unit, stage in self._stages.items() if stage in stages):
            keeps, costs = ({level: of[level][unit] for level in self.levels} for of in (self._keeps, self._costs))
            now = ""
            while better := [level for level in self.levels if keeps[level] < keeps[now]]:
                prices = {level: (costs[level] - costs[now]) / (keeps[now] - keeps[level]) for level in better}
                now = min(better, key=prices.__getitem__)
                moves.append((prices[now], unit, now))
        return [(unit, level) for _, unit, level in sorted(moves, key=operator.itemgetter(0))]

    def _simulated(self, extra: Mapping[int, float]) -> float:
        """Computes the seconds of a step if each microbatch of a stage takes `extra` seconds longer."""
        last = self._orders[0][-1][0]

        def seconds(kind: Kind, stage: int) -> float:
            return self._seconds[kind, stage] + (extra.get(stage, 0.0) if kind == last else 0.0)

        return simulate(self._orders, seconds, lambda _: 0.0).seconds

    def _read(self, order: Sequence[Pass], level: str, trace: Trace) -> None:
        """Reads a process's step with one level for all units: what each keeps, and how long it takes."""
        keeps, costs = self._keeps[level], self._costs[level]
        times, operators = self._times(trace), Counter(op.mark for op in trace.operators)
        python = CALLER * seconds_an_operator(level) if self._device is None else 0.0
        # Outside of units is the last one's: differences between levels alone count.
        index, unit, begun, forward, turned = -1, -1, 0, False, False
        for number in range(trace.ahead, len(trace.marks)):
            mark, (kind, stage, _) = trace.marks[number], order[index]
            time = self._scale * (times[number] + forward * python * operators[number])
            costs[unit] += time
            self._seconds[kind, stage] += 0.0 if level else time
            if mark.kind == START:
                index += 1
                forward, unit, begun = order[index][0] == "forward", -1, mark.level
                turned = turned or not forward
            elif mark.kind == FORWARD or (mark.kind == LEFT and mark.which == ROOT):
                keeps[unit] += 0 if turned else mark.level - begun
                begun, forward = mark.level, mark.kind == FORWARD
                if forward:
                    unit = mark.which
                    self._stages[unit] = stage
            elif mark.kind == BACKWARD:
                unit = mark.which

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


def _foreseen(fake_model: FakeModel, plan: Plan, samples: int, *, gpu: bool) -> Recomputation:
    needs = memory_forecast(fake_model, plan, batch=samples, gpu=gpu, bounded=True)
    if needs.most is None:
        raise PlanError(f"the peak of {plan_name(plan)} is not foreseen: leave memory= out, and write recompute")
    return Recomputation(plan=plan, needs=needs, peak=needs.most)


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
                return Units(fake_model, more, samples, device, gpu=gpu, rate=away).cheapest(limit, fit)
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
