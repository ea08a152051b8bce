"""Exchange: what a plan's processes take for their messages, and what the engine takes for them, on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from grappe.errors import PlanError
from grappe.foresight import links
from grappe.foresight.calibration import Calibration, Overhead
from grappe.foresight.parameters import Parameter
from grappe.foresight.partition import threads_of
from grappe.foresight.recording import Recording
from grappe.foresight.sharding import padded
from grappe.launch.world import cores
from grappe.parallel.shard import uses_shard
from grappe.plan import Plan

BUCKET = 25 << 20  # bytes of DistributedDataParallel's buckets
FIRST_BUCKET = 1 << 20
SMALL = 256.0  # bytes of a message that the engine's own time has in it


def kind_of(plan: Plan) -> str:
    """Returns the kind of plan whose engine's own time applies: one of calibration.KINDS."""
    if plan.tensor > 1:
        return "tensor"
    if uses_shard(plan) and plan.processes > 1:
        return "zero3" if plan.zero == 3 else "zero1"
    if uses_shard(plan):
        return "offload"
    return "replicate" if plan.replicate > 1 and plan.pipeline == 1 else "one"


def pipeline_kind(plan: Plan) -> str:
    """Returns the kind of pipeline whose passes' own time applies: one of calibration.KINDS."""
    return "pipeline" if plan.schedule in ("gpipe", "1f1b") else plan.schedule


class Exchange:
    """Times of the messages between processes that train these parameters."""

    def __init__(self, calibration: Calibration, parameters: Sequence[Parameter]) -> None:
        self._calibration, self._parameters = calibration, parameters

    def of(self, plan: Plan, passed: float, compute: float) -> tuple[float, float]:
        """Computes the engine's seconds of FSDP or several processes, and those of messages, not overlapped.

        Args:
            passed: seconds of a microbatch's forward and backward.
        """
        if plan.processes == 1 and not uses_shard(plan):
            return 0.0, 0.0
        own, trained = (
            self._calibration.overheads.get(kind_of(plan), Overhead()),
            [one for one in self._parameters if one.trained],
        )
        if not uses_shard(plan):
            messages = self._reduced(plan, [one.size for one in reversed(trained)])
            extra = own.step + own.parameter * len(trained)
        else:
            messages, units = self._sharded(plan)
            each = units * own.unit_beside(passed / units) + own.parameter * len(trained)
            reducing = 1 if plan.zero == 1 else plan.microbatches  # of the microbatches
            gathered = units * self._gathering(passed / units)
            extra = own.step + reducing * each + (plan.microbatches - reducing) * gathered
        messages = own.messages * messages + self.waited(plan, compute)
        if (
            plan.processes > 1 and plan.processes * threads_of(plan) < cores()
        ):  # messages have cores of their own
            messages = max(0.0, messages - compute / 2)
        return extra, messages

    def of_split(self, plan: Plan, recording: Recording, modules: int, compute: float) -> tuple[float, float]:
        """Computes the engine's seconds for modules that are split over processes, and those of their messages.

        Args:
            recording: a microbatch's, with the collectives.
            modules: the number of split modules.
        """
        own = self._calibration.overheads.get("tensor", Overhead())
        sent = sum(self.seconds(collective, plan.tensor, size) for collective, size in recording.messages)
        extra = own.step + plan.microbatches * modules * own.unit
        return extra, plan.microbatches * sent + self.waited(plan, compute)

    def waited(self, plan: Plan, compute: float) -> float:
        """Computes the seconds in which processes wait for the slowest, beyond those of a short message."""
        if plan.processes == 1:
            return 0.0
        (computed, waited), least = (
            self._points(plan.processes, links.MEETING)[0],
            self.seconds("all_reduce", plan.processes, SMALL),
        )
        return compute * max(0.0, waited - least) / computed

    def _gathering(self, computing: float) -> float:
        """Computes the engine's seconds for a unit that is gathered once, and whose gradients are not reduced.

        That is what zero=3, which gathers a unit twice, takes beyond zero=2.
        """
        twice, once = (self._calibration.overheads.get(kind, Overhead()) for kind in ("zero3", "zero1"))
        return max(0.0, twice.unit_beside(computing) - once.unit_beside(computing))

    def _reduced(self, plan: Plan, sizes: list[int]) -> float:
        """Computes the seconds of DistributedDataParallel's buckets, beyond those of a small one."""
        buckets, held, limit = list[int](), 0, FIRST_BUCKET
        for size in sizes:
            held += size
            if held >= limit:
                buckets.append(held)
                held, limit = 0, BUCKET
        buckets += [held] if held else []
        least = self.seconds("all_reduce", plan.replicate, SMALL)
        copied = 2 * sum(sizes) / self.bandwidth(plan)
        return copied + sum(self.seconds("all_reduce", plan.replicate, one) for one in buckets) - least

    def _sharded(self, plan: Plan) -> tuple[float, int]:
        """Computes the seconds of fully_shard's messages beyond those of small ones, and the number of units."""
        whole: dict[int, int] = {}
        trained: dict[int, int] = {}
        for one in self._parameters:
            if one.shape:
                whole[one.unit] = whole.get(one.unit, 0) + padded(one, plan.shard)
                if one.trained:
                    trained[one.unit] = trained.get(one.unit, 0) + padded(one, plan.shard)
        gathers = plan.microbatches * (2 if plan.zero == 3 else 1)
        reductions = 1 if plan.zero == 1 else plan.microbatches
        bandwidth = self.bandwidth(plan)

        def beyond(collective: str, size: int, processes: int) -> float:
            if processes == 1:  # it sends itself nothing; a sum's gradients are divided and copied
                return 4 * size / bandwidth if collective == "reduce_scatter" else 0.0
            return self.seconds(collective, processes, size) - self.seconds(collective, processes, SMALL)

        total = 0.0
        for size in whole.values():
            total += gathers * (beyond("all_gather", size, plan.shard) + 2 * size / bandwidth)
        for size in trained.values():
            total += reductions * (beyond("reduce_scatter", size, plan.shard) + 2 * size / bandwidth)
            if plan.replicate > 1:
                total += self.seconds("all_reduce", plan.replicate, size / plan.shard)
        return max(0.0, total), len(whole)

    def bandwidth(self, plan: Plan) -> float:
        """Returns the bytes/s of one process, while all others copy too."""
        known = self._calibration.bandwidth
        alone = known.get(str(threads_of(plan))) or max(known.values())
        together = known.get(str(cores())) or max(known.values())
        return min(alone, together / plan.processes)

    def seconds(self, collective: str, processes: int, size: float) -> float:
        """Computes the seconds of a message of `size` bytes.

        Raises:
            PlanError: messages between so many processes were not measured.
        """
        return links.seconds(self._points(processes, collective), size)

    def _points(self, processes: int, collective: str) -> links.Points:
        known = self._calibration.links.get(str(processes))
        if known is None:
            raise PlanError(
                f"messages between {processes} processes were not measured here: grappe doctor --calibrate measures "
                f"those between {' or '.join(self._calibration.links) or 'none'}"
            )
        return known[collective]
