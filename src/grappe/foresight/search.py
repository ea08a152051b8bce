"""Search: foresees plans that train the same, those that cost least first, and finds the first whose memory fits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence

from grappe import engines
from grappe.errors import GrappeError, PlanError, TaskError
from grappe.foresight.devices import Device
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import NOTHING_KEPT, LibraryMemory, MemoryForecast, library_memory, memory_forecast
from grappe.foresight.recomputation import Recomputation, fitted
from grappe.plan import Plan, as_plan
from grappe.words import count_of, format_bytes, plan_name

CONTEXT_BYTES = 1_500_000_000  # of a GPU: CUDA's context and libraries, and NCCL's buffers
SHARED_CONTEXT_BYTES = 1_000_000_000
"""The same of a process that shares its GPU, without NCCL: on the Alliance's PyTorch page a small network takes about
1 GB of a V100 in all, and 14 to 15 copies of it fit in 16 GB."""
MARGIN = 1.1  # of a peak: what an allocator cannot use between blocks, and kernels' workspace
GPU_WORKSPACE_BYTES = 256 << 20
"""For cuBLAS's and attention's own memory, which is not foreseen: an H100 took 0.2 GB more than foreseen, in fp32."""
SECONDS = 60  # of computing, for a search
MORE = (2, 4, 8)  # times as many processes, where none of as many fits
MEASURES = ("", "microbatches=4", "recompute", "recompute,microbatches=4")
"""Ways to need less memory in one process, the cheapest first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The memory that a process may have."""

    whose: str
    size: int
    """Bytes."""
    beyond: int = CONTEXT_BYTES
    """Bytes of it that a process takes beyond torch's allocations and what libraries keep."""
    libraries: LibraryMemory = NOTHING_KEPT
    """Memory that libraries keep where it is not measured of the plan itself; its `evaluation` is counted at least."""
    margin: float = MARGIN
    """Factor for a peak."""
    shared: bool = False
    """Whether all processes of a plan have it together, and get more than there is: checkpoints' copies count then.
    Elsewhere they are left out where memory is refused."""
    gpu: bool = True
    """Whether it is a GPU's."""

    def fits(self, needs: MemoryForecast, processes: int = 1) -> bool | None:
        """Returns whether a process has room; None: its peak is unknown, but its states alone have room."""
        sharing = processes if self.shared else 1
        if self._most(needs) is None:
            return None if (needs.states.total + self.fixed) * sharing <= self.size else False
        return self.taken(needs) * sharing <= self.size

    def taken(self, needs: MemoryForecast) -> int:
        """Computes the bytes that a process takes, at least, with a margin."""
        most, kept = self._most(needs), self.fixed
        if needs.libraries is not None:
            evaluation = max(self.libraries.evaluation, needs.libraries.evaluation)
            kept = self.beyond + evaluation + needs.libraries.step
        return int((needs.states.total if most is None else most) * self.margin) + kept

    def of_each(self, processes: int) -> MemoryBudget:
        """Returns the share of each of several processes on a GPU."""
        if processes == 1:
            return self
        whose = f"{self.whose}, shared by {processes} processes,"
        return dataclasses.replace(self, whose=whose, size=self.size // processes, beyond=SHARED_CONTEXT_BYTES)

    def room(self, processes: int = 1) -> int:
        """Computes the bytes that torch may allocate in a process of as many."""
        return int((self.size // (processes if self.shared else 1) - self.fixed) / self.margin)

    @property
    def fixed(self) -> int:
        """Computes the bytes of a process beyond torch's allocations, where libraries are not measured."""
        return self.beyond + self.libraries.total

    def _most(self, needs: MemoryForecast) -> int | None:
        return needs.with_copies if self.shared else needs.most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foreseen:
    """A plan, and the memory that it needs."""

    plan: str
    processes: int
    batch: int
    """Samples per step over all processes."""
    needs: MemoryForecast | None
    """Memory of the process that needs most; None if the plan is not possible, or not foreseen."""
    why: str = ""
    """The reason why there are no needs."""
    fits: bool | None = None
    """Whether there is room for it; None: unknown, or no room was given."""
    chosen: str = ""
    """A sentence on the choice of memory=, which made the plan."""


def candidates(counts: Sequence[int]) -> Iterator[Plan]:
    """Yields plans on each number of processes that train the same, those that cost least first."""
    for count in counts:
        spread = [""] if count == 1 else [f"replicate={count}", *(f"shard={count},zero={z}" for z in (1, 2, 3))]
        for measure in MEASURES:
            for text in spread:
                yield as_plan(",".join(filter(None, (text, measure))))


def foreseen(
    fake_model: FakeModel, plan: Plan, batch: int, budget: MemoryBudget | None, device: Device | None = None
) -> Foreseen:
    """Foresees one plan at a batch size of `batch` samples; with `budget`, whether there is room for it.

    Args:
        device: the GPU that it trains on; None: not known.

    Raises:
        TaskError: the task cannot be traced.
    """
    chosen, gpu = "", budget is not None and budget.gpu
    try:
        engines.check(plan)
        if plan.memory != "none":
            limit = plan.memory_limit if budget is None else plan.memory_limit or budget.room(plan.processes)
            if limit is None:
                raise PlanError("memory=auto: the device's memory is not known here: write it, as in memory=14GB")
            limit -= GPU_WORKSPACE_BYTES if gpu else 0
            choice = fitted(fake_model, plan, batch, limit, device, gpu=gpu)
            of_budget = (
                "" if budget is None or plan.memory_limit else f" (of {format_bytes(budget.size)}, {budget.whose})"
            )
            plan, chosen = choice.plan, choice.in_words(plan, limit, of_budget)
        forecast = memory_forecast(fake_model, plan, batch=batch, gpu=gpu)
        if budget is not None and not budget.gpu:
            without = dataclasses.replace(budget, libraries=NOTHING_KEPT)
            if without.fits(forecast, plan.processes):
                libraries = library_memory(fake_model.of(plan), plan, batch)
                forecast = dataclasses.replace(forecast, libraries=libraries)
    except GrappeError as error:
        if isinstance(error, TaskError):
            if plan.pipeline == plan.tensor == plan.domain == 1:
                raise  # every plan has it
            memory_forecast(fake_model, Plan(), batch=batch)  # raises it where it is not of stages or parts
        return Foreseen(plan=str(plan), processes=plan.processes, batch=batch, needs=None, why=str(error))
    return Foreseen(
        plan=str(plan),
        processes=plan.processes,
        batch=batch,
        needs=forecast,
        fits=None if budget is None else budget.fits(forecast, plan.processes),
        chosen=chosen,
    )


def fitting(
    fake_model: FakeModel,
    plan: Plan,
    budget: MemoryBudget,
    more: MemoryBudget | None = None,
    seconds: float = SECONDS,
) -> Foreseen | None:
    """Finds another plan that learns the same as `plan`, and fits: the first of those that cost least.

    Searches plans on as many processes; where none fits for sure, on 2, 4, or 8 times as many.

    Args:
        more: the memory that each of more processes may have; None: as much.

    Raises:
        TaskError: the task cannot be traced, or not in `seconds` of computing.
    """
    begun, states = time.process_time(), 0
    for times, memory in ((1, budget), *((times, more or budget) for times in MORE)):
        # A part of the samples comes with the whole model's states.
        several = times > 1 and plan.processes == 1 and plan.engine == "native" and states <= memory.room(times)
        parts = [as_plan(f"domain={times}{more}") for more in ("", ",recompute") if several]
        for ways in (*candidates([plan.replicate * plan.shard * times]), *parts):
            other = dataclasses.replace(
                plan,
                domain=plan.domain * ways.domain,
                replicate=ways.replicate,
                shard=ways.shard,
                zero=ways.zero,
                microbatches=max(plan.microbatches, ways.microbatches),
                recompute=plan.recompute or ways.recompute,
            )
            if other == plan:
                continue
            if time.process_time() - begun > seconds:
                raise too_slow(seconds)
            candidate = foreseen(fake_model, other, fake_model.task.batch_size, memory)
            if candidate.needs is not None:
                states = max(states, candidate.needs.states.total)
            if candidate.fits and other.recompute is True:  # all of it, where a part may be enough
                part = dataclasses.replace(other, recompute=False, memory="auto")
                least = foreseen(fake_model, part, fake_model.task.batch_size, memory)
                return least if least.fits else candidate
            if candidate.fits:
                return candidate
    return None


def on_each_number(
    fake_model: FakeModel,
    plan: Plan,
    counts: Sequence[int],
    batch: int,
    budget: MemoryBudget,
    device: Device | None = None,
) -> dict[int, Recomputation | PlanError]:
    """Finds, for each number of processes, the recomputation of least time with which `plan` fits; or why none does.

    Each process has a copy of the model, or else a shard of it. Ends with the first number on which it fits as it is.

    Args:
        plan: of one process.
        device: the GPU that it trains on; None: not known.
    """
    choices_by_count = dict[int, Recomputation | PlanError]()
    for count in counts:
        for replicate, shard in dict.fromkeys([(count, 1), (1, count)]):
            several = dataclasses.replace(plan, memory="auto", replicate=replicate, shard=shard)
            try:
                choice = fitted(fake_model, several, batch, budget.room(count), device, gpu=budget.gpu)
            except PlanError as error:
                choices_by_count[count] = error
                continue
            choices_by_count[count] = choice
            if not choice.plan.recompute and choice.plan.microbatches == plan.microbatches:
                return choices_by_count
            break
    return choices_by_count


def in_words(choices_by_count: Mapping[int, Recomputation | PlanError]) -> str:
    """Says on how many GPUs a training fits, and at what cost; "" if it fits on each number as it is."""
    fits, misses = list[str](), list[str]()
    for count, choice in choices_by_count.items():
        gpus = count_of(count, "GPU")
        if isinstance(choice, PlanError):
            misses.append(gpus)
            continue
        fits.append(f"on {gpus} with {choice.computing} ({plan_name(choice.plan)})")
    if not misses and "recompute" not in (text := " ".join(fits)) and "microbatches" not in text:
        return ""
    parts = [f"fits {', '.join(fits)}"] if fits else []
    return "; ".join([*parts, f"not on {' or '.join(misses)}"] if misses else parts)


def too_slow(seconds: float) -> TaskError:
    """Makes the error of a trace that takes longer than a command may wait."""
    return TaskError(f"data() and tracing the model take more than {seconds} s here: try grappe foresee")
