"""Pipeline passes: the operators of each pass of a pipeline's stages, and the simulation of a step of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from grappe.errors import PlanError
from grappe.foresight.microbatch import Part, Seconds, part_of
from grappe.foresight.partition import traced_passes
from grappe.foresight.passes import Kind, Pass
from grappe.foresight.pipeline_time import Simulated, orders_of, simulate
from grappe.foresight.recording import Operator, Recording
from grappe.foresight.sketch import Sketch
from grappe.foresight.trace import Trace
from grappe.plan import Plan


class PipelinePasses:
    """The passes of a pipeline's processes in one step of `samples` samples.

    Args:
        sketch: made with `records`.

    Raises:
        PlanError: the model cannot be cut into so many stages, or has a loss of the whole batch.
        TaskError: the task cannot be traced.
    """

    def __init__(self, sketch: Sketch, plan: Plan, samples: int) -> None:
        if sketch.task.whole_batch_loss:
            raise PlanError(
                "a pipeline with a loss of the whole batch: its time is not foreseen; grappe measure runs any plan"
            )
        self._orders = orders_of(plan)
        self._traces = traced_passes(sketch, plan, samples)
        self._handed: dict[int, int] = {}
        for order, trace in zip(self._orders, self._traces, strict=True):
            self._handed |= zip(sorted({stage for _, stage, _ in order}), trace.boundaries, strict=True)

    @property
    def recordings(self) -> list[Recording]:
        """Returns the operators of a step of each process."""
        return [one.recording for one in self._traces if one.recording is not None]

    def parts(self, seconds: Seconds) -> dict[tuple[Kind, int], Part]:
        """Computes the mean of each kind of pass of each stage, over the microbatches."""
        found: dict[tuple[Kind, int], Part] = {}
        for order, trace in zip(self._orders, self._traces, strict=True):
            found |= _parts(order, trace, seconds)
        return found

    def simulated(
        self, took: Mapping[tuple[Kind, int], float], transfer: Callable[[int], float]
    ) -> Simulated:
        """Simulates a step.

        Args:
            took: seconds of each kind of pass of each stage.
            transfer: seconds of a message of so many bytes between two processes.
        """
        return simulate(
            self._orders, lambda kind, stage: took[kind, stage], lambda stage: transfer(self._handed[stage])
        )


def _parts(order: Sequence[Pass], trace: Trace, seconds: Seconds) -> dict[tuple[Kind, int], Part]:
    assert trace.recording is not None and len(trace.marks) == 2 * len(order) + 1
    marked = defaultdict[int, list[Operator]](list)
    for one in trace.recording.operators:
        marked[one.mark].append(one)
    found = defaultdict[tuple[Kind, int], list[Part]](list)
    for index, (kind, stage, _) in enumerate(order):
        found[kind, stage].append(part_of(marked[2 * index + 1], seconds))  # up to the mark after the pass
    return {
        key: Part(
            kernels=sum(one.kernels for one in several) / len(several),
            operators=sum(one.operators for one in several) / len(several),
        )
        for key, several in found.items()
    }
