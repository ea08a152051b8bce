"""GPU time: a plan's step on GPUs that are not here, from their data sheet and the operators of a trace."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from grappe.errors import PlanError
from grappe.foresight import partition
from grappe.foresight.devices import LAUNCH, LEAST, OF_BANDWIDTH, PASS, SPLIT, STEP, Device, kernel_seconds
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.memory import second_step
from grappe.foresight.pipeline_trace import Kind, Pass, orders_of, simulate
from grappe.foresight.trace import LOSS, START, Operator, Trace
from grappe.plan import Plan
from grappe.step.clip import clipping, gradient_norm
from grappe.step.precision import LossScale
from grappe.step.task_contract import optimizer_of
from grappe.task import Task

UNTIMED = ("exact", "compile", "batchnorm", "domain")
"""Keys of plans whose time is not foreseen."""
SPREAD = 0.5
"""Relative uncertainty of times that were never measured on such a GPU."""
OVERLAP = 0.5  # of the computing, during which messages travel unnoticed
OF_NETWORK = 0.8
"""Share of a network's nominal rate that large messages reach: an assumption, not measured."""
NETWORK_LEAST = 20e-6
"""Seconds of a message between nodes that has next to nothing to carry: an assumption."""
Work = tuple[tuple[int, Sequence[Operator]], ...]
"""Operators of a step's parts, each with how often it runs."""
PART_OF_ALL_REDUCE = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step of the slowest process."""

    compute: float
    """Forward, backward, the optimizer's step, and the engine's own work."""
    communication: float = 0.0
    """Messages that nothing overlaps with."""
    bubble: float = 0.0
    """Waiting for other stages."""
    data: float = 0.0
    """Waiting for samples."""
    spread: float
    """Relative uncertainty."""
    measured: bool = False
    """Whether steps were run; else they are foreseen."""
    at_peak: tuple[float, float] | None = None
    """Seconds that a GPU would take at its peak FLOP/s, and at its full memory bandwidth; None: it is not a GPU's."""

    @property
    def total(self) -> float:
        """Sums all of them."""
        return self.compute + self.communication + self.bubble + self.data

    def gpu_share(self, seconds: float | None = None) -> float:
        """Computes the share of a GPU that a step uses: of its FLOP/s or its memory bandwidth, whichever is more.

        These are the two roofs of Williams et al. (2009). A GPU that runs a small kernel all the time is 100 % busy in
        nvidia-smi, and still nearly unused.

        Args:
            seconds: how long the step computes; None: as foreseen.
        """
        assert self.at_peak is not None
        return min(1.0, max(self.at_peak) / (seconds or self.compute))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fabric:
    """Nodes of equal GPUs; a plan's ranks fill one node after the other."""

    device: Device
    node: int = 1
    """GPUs of a node."""
    network_gbit: float | None = None
    """Gb/s of all of a node's network adapters together, in one direction; None: unknown."""

    def all_reduce(self, size: float, degree: int, stride: int = 1) -> float:
        """Computes the seconds of a ring's all-reduce of `size` bytes (Patarasuk and Yuan 2009).

        A ring crosses each node's border once in each direction, so that its slowest link is the node's network
        (bus bandwidth in nccl-tests, doc/PERFORMANCE.md).

        Args:
            degree: processes that reduce together.
            stride: ranks from one of them to the next: 1, or the product of the axes inside theirs.
        """
        if degree == 1:
            return 0.0
        return 2 * (degree - 1) / degree * size / self._rate(degree, stride)

    def message(self, size: float, degree: int, stride: int = 1) -> float:
        """Computes the seconds of a message of `size` bytes to the next of `degree` processes."""
        least = NETWORK_LEAST if self._crosses_nodes(degree, stride) else LEAST
        return least + size / self._rate(degree, stride)

    def _crosses_nodes(self, degree: int, stride: int) -> bool:
        return degree * stride > max(1, self.node)

    def _rate(self, degree: int, stride: int) -> float:
        """Returns the bytes/s of the slowest link: all groups of a node that leave it share its network."""
        link = self.device.link_gb * 1e9 * OF_BANDWIDTH
        if not self._crosses_nodes(degree, stride):
            return link
        assert self.network_gbit is not None
        groups = min(stride, self.node)
        return min(link, self.network_gbit * 1e9 / 8 * OF_NETWORK / groups)


def gpu_time(fake_model: FakeModel, plan: Plan, fabric: Fabric, *, batch: int | None = None) -> StepTime:
    """Foresees a step of `plan`, one process on each GPU; kernels by roofline, the host by operators.

    Args:
        fake_model: made with `records`.
        batch: samples per step over all processes; None: the task's.

    Raises:
        PlanError: the plan's time is not foreseen.
        TaskError: the task cannot be traced.
    """
    refuse_untimed(plan)
    if plan.processes > max(1, fabric.node) and fabric.network_gbit is None:
        raise PlanError(
            f"{plan.processes} GPUs, and a node has {fabric.node}: the rate of the network between nodes is not "
            "known here (network_gbit in the site's file), so the time is not foreseen"
        )
    device = fabric.device
    device.flops(plan.precision)
    fake_model = fake_model.of(plan)
    samples = batch or fake_model.task.batch_size
    if plan.pipeline > 1:
        return _pipelined(fake_model, plan, samples, fabric)
    rows = partition.largest_rows(fake_model, plan, samples)
    trace = fake_model.trace(rows, partition.precision_of(plan), plan.recompute, 1, plan.tensor)
    update = _updates(fake_model, plan)[0]
    work = (plan.microbatches, trace.operators), (1, update)
    busy = sum(times * kernel_seconds(device, operators, plan.precision) for times, operators in work)
    loss = next(number for number, mark in enumerate(trace.marks) if mark.kind == LOSS)
    launches = sum(
        _launch(operator, "forward" if operator.mark <= loss else "backward") for operator in trace.operators
    )
    split_modules = {name.rpartition(".")[0] for name in partition.tensor_parts(fake_model, plan)[0]}
    host = STEP + plan.microbatches * (launches + len(split_modules) * SPLIT)
    host += _launches(update, "update")
    compute = max(busy, host)
    # The next operator waits for each message of a split module.
    split = plan.microbatches * sum(
        LEAST + PART_OF_ALL_REDUCE[operator.collective] * fabric.all_reduce(operator.message, plan.tensor)
        for operator in trace.operators
        if operator.collective is not None
    )
    return StepTime(
        compute=compute,
        communication=split + max(0.0, _exchanged(fake_model, plan, fabric) - OVERLAP * compute),
        spread=SPREAD,
        at_peak=_at_peak(device, plan.precision, work),
    )


def refuse_untimed(plan: Plan) -> None:
    """Raises PlanError for a plan whose time is not foreseen."""
    together = {
        "pipeline with shard": plan.pipeline > 1 and plan.shard > 1,
        "pipeline with offload": plan.pipeline > 1 and plan.offload != "none",
        "tensor with another axis": 1 < plan.tensor < plan.processes,
        "tensor with offload": plan.tensor > 1 and plan.offload != "none",
        "offload on a GPU": plan.offload != "none",
        "activations on the host": "host" in str(plan.recompute),
    }
    keys = [key for key in UNTIMED if key in plan.changed_keys()]
    why = next(iter([*keys, *(name for name, applies in together.items() if applies)]), None)
    if why is not None:
        raise PlanError(f"{why}: its time is not foreseen; grappe measure runs any plan")


def _pipelined(fake_model: FakeModel, plan: Plan, samples: int, fabric: Fabric) -> StepTime:
    """Foresees a step of a pipeline, pass by pass; the others wait for the process that has most."""
    if fake_model.task.whole_batch_loss:
        raise PlanError(
            "a pipeline with a loss of the whole batch: its time is not foreseen; grappe measure runs any plan"
        )
    orders, traces = orders_of(plan), partition.traced_passes(fake_model, plan, samples)
    handed: dict[int, int] = {}  # bytes, by the stage that hands them to the next one
    for order, trace in zip(orders, traces, strict=True):
        handed |= zip(sorted({stage for _, stage, _ in order}), trace.boundaries, strict=True)
    owned, device = partition.stage_parameters(fake_model, plan), fabric.device
    on_gpu, ahead, back = (
        pass_means(orders, traces, value)
        for value in (
            lambda operator: device.kernel(operator, plan.precision),
            lambda operator: _launch(operator, "forward"),
            lambda operator: _launch(operator, "backward"),
        )
    )
    seconds = {
        key: max(kernels, PASS + (ahead if key[0] == "forward" else back)[key]) for key, kernels in on_gpu.items()
    }

    def message(stage: int) -> float:
        return fabric.message(handed[stage], plan.pipeline, plan.processes // plan.pipeline)

    simulated = simulate(orders, lambda kind, stage: seconds[kind, stage], message)
    updates = _updates(fake_model, plan)
    updated = max(
        max(kernel_seconds(device, update, plan.precision), STEP + _launches(update, "update")) for update in updates
    )
    works = [((1, trace.operators), (1, update)) for trace, update in zip(traces, updates, strict=True)]
    largest = max(sum(parameter.size for parameter in own if parameter.trained) for own in owned)
    return StepTime(
        compute=max(simulated.busy) + updated,
        bubble=simulated.bubble,
        communication=fabric.all_reduce(largest, plan.replicate),
        spread=SPREAD,
        at_peak=max((_at_peak(device, plan.precision, work) for work in works), key=max),
    )


def pass_means(
    orders: Iterable[Sequence[Pass]], traces: Iterable[Trace], value: Callable[[Operator], float]
) -> dict[tuple[Kind, int], float]:
    """Sums a value over the operators of each kind of pass of each stage; the mean over microbatches."""
    sums = defaultdict[tuple[Kind, int], list[float]](list)
    for order, trace in zip(orders, traces, strict=True):
        by_pass = [0.0] * len(order)
        begun = list(itertools.accumulate((mark.kind == START for mark in trace.marks), initial=-1))
        for operator in trace.operators:
            by_pass[begun[operator.mark]] += value(operator)
        for total, (kind, stage, _) in zip(by_pass, order, strict=True):
            sums[kind, stage].append(total)
    return {key: sum(several) / len(several) for key, several in sums.items()}


def update_operators(
    task: Task, mode: Any, named: Sequence[tuple[str, tuple[int, ...], torch.dtype]]
) -> list[Operator]:
    """Clips and steps the task's optimizer on fake parameters of these names, shapes and types.

    Returns the operators of the second step; the optimizer steps all parameters at once, as it does on a GPU.
    """
    if not named:
        return []
    with mode:
        pairs = [(name, nn.Parameter(torch.empty(shape, dtype=kind))) for name, shape, kind in named]
        parameters = [parameter for _, parameter in pairs]
        optimizer = optimizer_of(task, pairs)
        clip = clipping(task, Plan(), LossScale("fp32"), parameters, lambda: gradient_norm(parameters))
        return second_step(optimizer, parameters, clip=clip, foreach=True, records=True).operators


def _updates(fake_model: FakeModel, plan: Plan) -> list[list[Operator]]:
    """Returns the operators of an update, of the first process of each stage of a pipeline."""
    kinds = {2: torch.bfloat16, 8: torch.float64}
    updates = []
    for parts in partition.first_processes(fake_model, plan):
        trained = [(part.parameter, part.shape) for part in parts if part.parameter.trained]
        named = [(parameter.name, shape, kinds.get(parameter.item, torch.float32)) for parameter, shape in trained]
        updates.append(update_operators(fake_model.task, fake_model.mode, named))
    return updates


def _at_peak(device: Device, precision: str, work: Work) -> tuple[float, float]:
    """Computes the seconds of FLOPs at a GPU's peak, and of bytes at its full bandwidth."""
    counted = [(times, each) for times, operators in work for each in operators if not (each.view or each.collective)]
    flops, moved = (sum(times * getattr(each, name) for times, each in counted) for name in ("flops", "moved"))
    return flops / device.flops(precision), moved / (device.bandwidth_gb * 1e9)


def _launches(operators: Iterable[Operator], phase: str) -> float:
    return sum(_launch(operator, phase) for operator in operators)


def _launch(operator: Operator, phase: str) -> float:
    return LAUNCH["view" if operator.view else phase]


def _exchanged(fake_model: FakeModel, plan: Plan, fabric: Fabric) -> float:
    """Computes the seconds of a step's messages, overlapped or not: gathering and reducing take half each.

    Replicas of shards reduce the gradients of their own shard alone.
    """
    size = sum(parameter.size for parameter in fake_model.parameters if parameter.trained)
    across = fabric.all_reduce(size / plan.shard, plan.replicate, plan.shard)
    if plan.shard == 1:
        return across
    gathers = plan.microbatches * (2 if plan.zero == 3 else 1)
    reductions = 1 if plan.zero == 1 else plan.microbatches
    return (gathers + reductions) * fabric.all_reduce(size, plan.shard) / 2 + reductions * across
