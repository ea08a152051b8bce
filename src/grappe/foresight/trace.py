"""Trace: a microbatch's forward and backward on fake tensors, or its evaluation; its operators and the bytes in use."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from grappe.data.batch import Batch, Microbatch, entering
from grappe.foresight.kernels import WITH_SCRATCH, Call, Kernels, describe
from grappe.launch.world import World
from grappe.parallel.activation_checkpointing import Host
from grappe.parallel.batchnorm import buffers_kept
from grappe.plan import Plan
from grappe.private_api.torch import TorchDispatchMode, operator_mutates, tree_leaves
from grappe.rows.tensor import Rows, local_rows
from grappe.step.fast_paths import backward
from grappe.step.loss import Loss
from grappe.step.precision import autocast
from grappe.step.scores import make_losses
from grappe.step.whole_batch_loss import AnyLosses, WholeBatchLosses
from grappe.task import Task

WAIT = "wait_tensor.default"
UNCOUNTED = ("prim", "profiler")
"""Namespaces of operators that ask for a property of a tensor, or mark a place."""
COLLECTIVES = {
    "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce_scatter",
}
"""Operators of split modules that send messages, by name, and the names of their collectives."""


class Mark(NamedTuple):
    """A moment of a traced step."""

    kind: str
    which: int
    """Index of the unit or parameter; -1: the whole model."""
    level: int
    """Bytes in use at this moment, over those before the step."""
    peak: int
    """Most bytes in use since the mark before."""


class Operator(NamedTuple):
    """One call of an operator."""

    name: str
    """aten.mm.default"""
    mark: int
    """Number of the trace's next mark."""
    flops: int
    moved: int
    """Bytes that are read and written, each tensor once."""
    view: bool
    """Whether it computes nothing: its output is a view."""
    message: int
    """Bytes of its largest tensor: of a collective the whole message, which is summed or gathered."""

    @property
    def collective(self) -> str | None:
        """Returns the name of the collective; None: the operator sends nothing."""
        return COLLECTIVES.get(self.name)


class Ledger(TorchDispatchMode):
    """Mode that follows the storage of each operator's output from its creation to its end.

    Args:
        existing: tensors whose bytes do not count.
        describes: whether to keep the calls of operators whose kernels are of libraries in `calls`.
        records: whether to keep every operator in `operators`, and its call.
    """

    def __init__(self, existing: Iterable[Tensor], *, describes: bool = False, records: bool = False) -> None:
        super().__init__()
        self._storages: Any = WeakIdKeyDictionary(ref_type=weakref.ref)
        self._ends: dict[int, weakref.ref] = {}
        self._describes, self._records = describes, records
        self.now = self._peak = self.message = 0
        self.marks: list[Mark] = []
        self.calls: list[tuple[int, int, Any]] = []
        """Described operators: the number of the next mark, the bytes in use, the description."""
        self.operators: list[Operator] = []
        for tensor in existing:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor
            self._storages[local.untyped_storage()] = 0

    def mark(self, kind: str, which: int = -1) -> None:
        """Notes a moment."""
        self.marks.append(Mark(kind, which, self.now, max(self._peak, self.now)))
        self._peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is Rows or hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others (DTensor, Rows): the operators on those are counted
        keywords = kwargs or {}
        # Without values it would be a new tensor, where it is the one that is waited for.
        output = args[0] if func.__name__ == WAIT else func(*args, **keywords)
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if self._records and func.namespace not in UNCOUNTED:
            self._record(func, args, keywords, output, made)
        if func.namespace == "_c10d_functional" and str(func) in COLLECTIVES:
            self.message = max(self.message, args[0].nbytes, *(tensor.nbytes for tensor in made))
        for tensor in made:
            self._follow(tensor)
        self._peak = max(self._peak, self.now)
        call = describe(func, args, keywords, output, every=self._records) if self._describes else None
        if call is not None:
            self.calls.append((len(self.marks), self.now, call))
        return output

    def _record(self, operator: Any, arguments: Any, keywords: Any, output: Any, made: list[Tensor]) -> None:
        """Keeps a call; before its output is followed, so that a view is told by its storage."""
        read = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        read = [tensor for tensor in read if tensor.layout == torch.strided]
        inputs = {id(tensor.untyped_storage()) for tensor in read}
        old = all(
            id(tensor.untyped_storage()) in inputs or tensor.untyped_storage() in self._storages for tensor in made
        )
        sizes = {}  # of each tensor once
        for tensor in (*read, *made):
            view = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
            sizes[id(tensor.untyped_storage()), view] = math.prod(tensor.shape) * tensor.dtype.itemsize
        self.operators.append(
            Operator(
                name=str(operator),
                mark=len(self.marks),
                flops=_flops(operator, arguments, keywords, output),
                moved=sum(sizes.values()),
                view=bool(made) and old and not operator_mutates(operator),
                message=max(sizes.values(), default=0),
            )
        )

    def _follow(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        before = self._storages.get(storage)
        if before is not None and before in (0, size):
            return
        self._storages[storage] = size
        self.now += size - (before or 0)
        key = id(storage)
        ledger = self

        def ended(_: Any, size: int = size) -> None:
            ledger._ends.pop(key, None)
            ledger.now -= size

        self._ends[key] = weakref.ref(storage, ended)


def _flops(operator: Any, arguments: Any, keywords: Any, output: Any) -> int:
    name = operator.overloadpacket
    if str(name).endswith("attention_for_cpu"):  # torch counts GPUs' kernels only
        return sdpa_flop_count(*(tensor.shape for tensor in arguments[:3]))
    if str(name).endswith("attention_for_cpu_backward"):
        return sdpa_backward_flop_count(*(tensor.shape for tensor in arguments[:4]))
    count = flop_registry.get(name)
    return 0 if count is None else int(count(*arguments, **keywords, out_val=output))


CPU = torch.device("cpu")
START, FORWARD, LEFT, LOSS, BACKWARD, DONE, GRADIENT, END, SCORED, REDUCE = (
    "start", "forward", "left", "loss", "backward", "done", "gradient", "end", "scored", "reduce",
)  # fmt: skip
"""Kinds of marks: of a unit its forward's beginning and end, its backward's beginning and end; of a parameter its
gradient; of the whole model the beginning, its forward's end, the loss and the end; SCORED: an evaluation's end;
REDUCE: where a pipeline's process reduces the gradients of all its passes."""
ROOT = -1
TOTAL_AND_COUNT = 2
"""Numbers that an evaluation keeps of a microbatch whose losses have no names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A microbatch's forward and backward on one process, whose gradients are taken away as soon as they are there."""

    rows: int
    marks: tuple[Mark, ...]
    batch: int
    """Bytes of its inputs, targets and weights."""
    message: int = 0
    """Bytes of the largest message between the parts of split layers."""
    boundaries: tuple[int, ...] = ()
    """Bytes that each stage of a pipeline sends to the next one."""
    calls: tuple[tuple[int, int, Call], ...] = ()
    """Operators whose kernels are of libraries, each with the number of the next mark and the bytes in use; all that
    compute, if operators are recorded."""
    complete: bool = True
    """Whether what all kernels take is counted."""
    operators: tuple[Operator, ...] = ()
    """All operators, if they are recorded."""
    ahead: int = 0
    """So many marks, the first ones, are of the pass ahead that a loss of the whole batch needs."""
    numbers: int = 0
    """Numbers that an evaluation keeps of each microbatch."""
    moved: tuple[int, ...] = ()
    """Bytes of each unit's activations that are offloaded to the host's memory and loaded again."""


class TracedHost(Host):
    """The host's memory of a GPU's model: what goes there takes none of what is traced, and comes back as new."""

    def to_host(self, flat: Tensor) -> Any:
        return functools.partial(torch.empty, flat.shape, dtype=flat.dtype)

    def to_device(self, copy: Any, device: torch.device) -> Tensor:
        return copy(device=device)


def traced(
    task: Task,
    model: nn.Module,
    units: Sequence[nn.Module],
    batch: Batch,
    precision: str,
    plan: Plan,
    world: World,
    *,
    describes: bool,
    records: bool = False,
    trains: bool = True,
) -> Trace:
    """Runs `model` on `batch` and follows the bytes in use; inside the mode of fake tensors.

    Args:
        units: the model's, whose beginnings and ends are marked.
        plan: what the task's loss is computed under, in `world`.
        describes: whether to keep the calls of operators whose kernels are of libraries.
        records: whether to record all operators.
        trains: whether to run backward; else gradients must be off.
    """
    micro = batch.microbatches[0]
    existing = [*model.parameters(), *model.buffers(), *map(local_rows, tensors_of(batch.microbatches))]
    ledger = Ledger(existing, describes=describes, records=records)
    for number, unit in enumerate(units):
        watch(unit, number, ledger)
    take_gradients(enumerate(model.parameters()), ledger)
    losses = make_losses(task, plan, world)
    numbers = 0
    with ledger:
        if trains and isinstance(losses, WholeBatchLosses) and losses.look_ahead_needed(batch):
            with autocast(precision, CPU):
                _first_pass(task, model, losses, batch, ledger)
        ahead = len(ledger.marks)
        ledger.mark(START)
        with autocast(precision, CPU):
            compute: Callable[..., Loss | int] = losses if trains else functools.partial(scored, losses)
            result = compute(_left(ledger, task.forward(model, entering(micro))), micro, batch)
        if isinstance(result, Loss):
            ledger.mark(LOSS)
            backward((result.values,), (result.output_gradient,))
            del result, losses, compute
            ledger.mark(END)
        else:
            numbers = result
            ledger.mark(SCORED)
    return made(ledger, micro, ahead=ahead, numbers=numbers)


def made(ledger: Ledger, micro: Microbatch, **others: Any) -> Trace:
    """Returns the trace that a ledger has followed, of a microbatch."""
    return Trace(
        rows=micro.size,
        marks=ordered(ledger.marks),
        batch=sum(local_rows(tensor).nbytes for tensor in tensors_of(micro)),
        message=ledger.message,
        calls=tuple(ledger.calls),
        operators=tuple(ledger.operators),
        **others,
    )


@torch.no_grad()
def _first_pass(task: Task, model: nn.Module, losses: WholeBatchLosses, batch: Batch, ledger: Ledger) -> None:
    """Runs forward of all microbatches, whose outputs a loss of the whole batch needs first."""
    outputs = []
    with buffers_kept(model):
        for micro in batch.microbatches:
            ledger.mark(START)
            outputs.append(_left(ledger, task.forward(model, entering(micro))))
        losses.look_ahead(batch, outputs, 1.0)
    outputs.clear()
    ledger.mark(SCORED)


def with_kernels(trace: Trace, kernels: Kernels | None, threads: int) -> Trace:
    """Returns the trace, with the bytes that its kernels take beyond their output with `threads` threads."""
    if kernels is None:
        return trace
    calls = [call for call in trace.calls if call[2].starts(WITH_SCRATCH)]
    sizes = kernels.sizes((call for _, _, call in calls), threads)
    marks = list(trace.marks)
    for place, level, call in calls:
        mark = marks[place]
        marks[place] = mark._replace(peak=max(mark.peak, level + sizes.get(call, 0)))
    complete = all(call in sizes for _, _, call in calls)
    return dataclasses.replace(trace, marks=tuple(marks), complete=complete)


def scored(losses: AnyLosses, output: Any, micro: Microbatch, batch: Batch) -> int:
    """Computes what an evaluation computes of a microbatch's output; returns how many numbers it keeps."""
    if isinstance(losses, WholeBatchLosses):
        losses.scored(output, micro, batch)
        return TOTAL_AND_COUNT
    values, named = losses.values(output, micro)
    losses.total(values, micro)
    counts = len(micro.weights) if isinstance(micro.weights, Mapping) else 0
    return TOTAL_AND_COUNT + len(named) + counts


def watch(unit: nn.Module, number: int, ledger: Ledger) -> None:
    """Marks where a unit's forward and backward begin and end."""

    def enters(_: Any, inputs: Any, keywords: Any = None) -> None:
        ledger.mark(FORWARD, number)
        for leaf in tensors_of((inputs, keywords)):
            if leaf.requires_grad:
                leaf.register_hook(lambda gradient: ledger.mark(DONE, number))

    def leaves(_: Any, inputs: Any, output: Any) -> None:
        for leaf in tensors_of(output):
            if leaf.requires_grad:
                leaf.register_hook(lambda gradient: ledger.mark(BACKWARD, number))
        ledger.mark(LEFT, number)

    unit.register_forward_pre_hook(enters, with_kwargs=True)
    unit.register_forward_hook(leaves)


def ordered(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Orders marks of one moment: a unit's backward ends before the backward of the previous unit begins.

    Both are hooks of the tensor between the two, which run in the order of the forward.
    """
    result: list[Mark] = []
    for mark in marks:
        before = result[-1] if result else mark
        if mark.kind == DONE and before.kind == BACKWARD and mark.peak == mark.level == before.level:
            result[-1:] = [mark._replace(peak=before.peak), before._replace(peak=before.level)]
        else:
            result.append(mark)
    return tuple(result)


def _left(ledger: Ledger, output: Any) -> Any:
    ledger.mark(LEFT)
    return output


def take_gradients(numbered: Iterable[tuple[int, Tensor]], ledger: Ledger) -> None:
    """Hooks each parameter: marks when its gradient is ready, and frees it."""

    def take_gradient(number: int, parameter: Tensor) -> None:
        parameter.grad = None
        ledger.mark(GRADIENT, number)

    for number, parameter in numbered:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(functools.partial(take_gradient, number))


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors of a nested value."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
