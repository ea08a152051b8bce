"""Sketch: a task's model, optimizer and batches on fake tensors, from which steps are traced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grappe.data.batch import Batch, Microbatch
from grappe.data.loader import BatchLoader, training_loader
from grappe.data.prepare import dataset_of
from grappe.data.rand_like import entering
from grappe.data.rows import at_rows
from grappe.errors import GrappeError, PlanError, TaskError, user_code
from grappe.errors.user_code import naming_user_line
from grappe.foresight.kernels import Kernels
from grappe.foresight.ledger import Ledger, Mark
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.parallel.activation_checkpointing import checkpoint_activations, switch_off_caches
from grappe.parallel.materialise import give_memory, on_meta
from grappe.plan import Plan
from grappe.private_api.torch import fake_tensors, tree_leaves, tree_map
from grappe.step.fast_paths import backward
from grappe.step.given import optimizer_of
from grappe.step.losses import Losses
from grappe.step.precision import autocast
from grappe.task import Task

CPU = torch.device("cpu")
SAMPLES = 16  # read from the data; larger batches repeat them
START, FORWARD, LEFT, LOSS, BACKWARD, DONE, GRADIENT, END = (
    "start", "forward", "left", "loss", "backward", "done", "gradient", "end",
)  # fmt: skip
"""Kinds of marks: of a unit its forward's beginning and end, its backward's beginning and end; of a parameter its
gradient; of the whole model the beginning, the loss and the end."""
ROOT = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """Memory that training a parameter takes; of a tied one, once."""

    name: str
    shape: tuple[int, ...]
    item: int
    """Bytes of a number."""
    trained: bool
    unit: int
    """The first unit that has it; ROOT: none."""
    state: int = 0
    """Bytes of the optimizer's state that has a number for each of the parameter's."""
    whole_state: int = 0
    """Bytes of the optimizer's other state, a step count say, which is never split."""
    temporary: int = 0
    """Bytes that the optimizer needs while it steps this parameter."""

    @property
    def size(self) -> int:
        """Computes the parameter's bytes."""
        return self.item * math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A microbatch's forward and backward on one process, whose gradients are taken away as soon as they are there."""

    rows: int
    marks: tuple[Mark, ...]
    batch: int
    """Bytes of its inputs, targets and weights."""
    boundaries: tuple[int, ...]
    """Bytes of each unit's output."""
    complete: bool = True
    """Whether what all kernels take is counted."""


class Sketch:
    """A task's model and optimizer without memory; made once, traced for each size of microbatch.

    Args:
        data: the folder of datasets.
        foreach: whether the optimizer steps all parameters at once, as it does on a GPU.
        kernels: what kernels take besides their output; None: nothing, as on a device that is not here.

    Raises:
        TaskError: the model, the loss or the optimizer cannot run without values, or the task's own code fails.
    """

    def __init__(
        self, task: Task, data: Path, *, foreach: bool = False, kernels: Kernels | None = None
    ) -> None:
        self.task, self._kernels = task, kernels
        self.mode: Any = fake_tensors()
        with naming_user_line(task):
            self._batch = _Batches(task, data, self.mode)
        with _explained(task, "be made"):
            self.plain = on_meta(task)
            model = self._made()
            homes = homes_of(task.units(model))
            self.buffers = sum(one.nbytes for one in model.buffers())
        with _explained(task, "be stepped by its optimizer"), self.mode:
            self.parameters, self.together = _stepped(task, list(model.named_parameters()), homes, foreach)
        self.samples = self._batch.samples

    @functools.lru_cache(maxsize=64)  # noqa: B019 - as long as the sketch
    def trace(self, rows: int, precision: str = "fp32", recompute: bool = False, threads: int = 1) -> Trace:
        """Traces a microbatch of `rows` samples, in a process of so many threads."""
        if self._kernels is not None:
            self._kernels.threads = threads
        found = self._trace(rows, precision, recompute)
        if self._kernels is not None and self._kernels.measure():
            found = self._trace(rows, precision, recompute)
        return found

    def _trace(self, rows: int, precision: str, recompute: bool) -> Trace:
        plan, model = Plan(recompute=recompute), self._made()
        inside = list(self.task.units(model))
        switch_off_caches(model, plan)
        checkpoint_activations(inside or [model], plan)
        batch = self._batch.of(rows)
        with _explained(self.task, "run"), self.mode:
            return _traced(self.task, model, inside, batch, precision, self._kernels)

    def example(self) -> Any:
        """Returns the inputs of one or two samples, by which a pipeline's stages are cut."""
        return self._batch.example

    def _made(self) -> nn.Module:
        model = on_meta(self.task)
        with self.mode:
            give_memory(model, CPU)
        return model.train()


class _Batches:
    """Batches of any number of samples, from a few that are read."""

    def __init__(self, task: Task, data: Path, mode: Any) -> None:
        dataset = dataset_of(task, "train", data)
        self._task, self._dataset, self._mode = task, dataset, mode
        self.samples = len(dataset)
        self._world = World(process=ProcessRank(), device=CPU)
        self._read = self._rehearsed(min(SAMPLES, self.samples))
        self.example = self._loader(2).example()

    def of(self, rows: int) -> Batch:
        """Makes a batch of `rows` samples, without values."""
        read, count = self._read, self._read.microbatches[0].size
        if rows != count:
            micro = read.microbatches[0]
            places = [number % count for number in range(rows)]
            try:
                inputs, targets, weights = at_rows(
                    (micro.inputs, micro.targets, micro.weights), places, count
                )
            except PlanError:  # a batch of graphs, say: it has to be read
                read = self._rehearsed(rows)
            else:
                ids = micro.sample_ids
                if ids is not None:
                    ids = ids._replace(ids=ids.ids[np.array(places)])
                made = Microbatch(inputs, targets, rows, weights, 0, ids)
                read = read._replace(microbatches=(made,), samples=rows)
        micro = read.microbatches[0]
        fake = tree_map(self._fake, (micro.inputs, micro.targets, micro.weights))
        micro = micro._replace(inputs=fake[0], targets=fake[1], weights=fake[2])
        count_of = read.count if isinstance(read.count, float) else self._fake(read.count)
        return read._replace(microbatches=(micro,), count=count_of)

    def _loader(self, rows: int) -> BatchLoader:
        task = dataclasses.replace(self._task, batch_size=rows)
        return training_loader(task, self._dataset, Plan(), self._world)

    def _rehearsed(self, rows: int) -> Batch:
        return next(self._loader(min(rows, self.samples)).rehearsed())

    def _fake(self, leaf: Any) -> Any:
        return self._mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf


def homes_of(units: Sequence[nn.Module]) -> dict[int, int]:
    """Returns the first unit of each parameter, by its id."""
    homes: dict[int, int] = {}
    for number, unit in enumerate(units):
        for one in unit.parameters():
            homes.setdefault(id(one), number)
    return homes


def _stepped(
    task: Task, named: Sequence[tuple[str, nn.Parameter]], homes: dict[int, int], foreach: bool
) -> tuple[tuple[Parameter, ...], float]:
    """Steps the optimizer on one parameter after the other, and notes what each takes; then on all together.

    Returns:
        The parameters; and how many times the largest of their temporary bytes a step of all takes: Python keeps the
        last parameter's until the next has made its own, and foreach makes all at once.
    """
    trained = [(name, one) for name, one in named if one.requires_grad]
    optimizer = optimizer_of(task, trained)
    for group in optimizer.param_groups:
        if foreach and group.get("foreach", False) is None:
            group["foreach"] = True
    found = []
    for name, one in named:
        state = whole = temporary = 0
        if one.requires_grad:
            one.grad = torch.empty_like(one)
            optimizer.step()  # makes the state
            values = _tensors(dict(optimizer.state.get(one, {})))
            state = sum(value.nbytes for value in values if value.shape == one.shape and value.dim())
            whole = sum(value.nbytes for value in values) - state
            ledger = Ledger([one, one.grad, *values])
            with ledger:
                optimizer.step()
            ledger.mark(END)
            one.grad = None
            temporary = ledger.marks[-1].peak
        found.append(
            Parameter(
                name=name,
                shape=tuple(one.shape),
                item=one.element_size(),
                trained=one.requires_grad,
                unit=homes.get(id(one), ROOT),
                state=state,
                whole_state=whole,
                temporary=temporary,
            )
        )
    for _, one in trained:
        one.grad = torch.empty_like(one)
    held = [
        value for _, one in named for value in (one, one.grad, *_tensors(dict(optimizer.state.get(one, {}))))
    ]
    ledger = Ledger([value for value in held if value is not None])
    with ledger:
        optimizer.step()
    ledger.mark(END)
    for _, one in trained:
        one.grad = None
    return tuple(found), ledger.marks[-1].peak / max(1, *(one.temporary for one in found))


def _traced(
    task: Task,
    model: nn.Module,
    units: Sequence[nn.Module],
    batch: Batch,
    precision: str,
    kernels: Kernels | None,
) -> Trace:
    micro = batch.microbatches[0]
    given = _tensors(micro)
    if kernels is not None:
        kernels.untried = False
    ledger = Ledger([*model.parameters(), *model.buffers(), *given], kernels)
    boundaries = [0] * len(units)
    for number, unit in enumerate(units):
        _watch(unit, number, ledger, boundaries)
    for number, (_, parameter) in enumerate(model.named_parameters()):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(functools.partial(_gradient, ledger, number))
    losses = Losses(task)
    with ledger:
        ledger.mark(START)
        with autocast(precision, CPU):
            loss = losses(task.forward(model, entering(micro)), micro, batch)
        ledger.mark(LOSS)
        backward((loss.values,), (loss.output_gradient,))
        del loss, losses
        ledger.mark(END)
    return Trace(
        rows=micro.size,
        marks=tuple(ledger.marks),
        batch=sum(one.nbytes for one in given),
        boundaries=tuple(boundaries),
        complete=kernels is None or not kernels.untried,
    )


def _watch(unit: nn.Module, number: int, ledger: Ledger, boundaries: list[int]) -> None:
    """Marks where a unit's forward and backward begin and end."""

    def enters(_: Any, inputs: Any, keywords: Any = None) -> None:
        ledger.mark(FORWARD, number)
        for leaf in _tensors((inputs, keywords)):
            if leaf.requires_grad:
                leaf.register_hook(lambda gradient: ledger.mark(DONE, number))

    def leaves(_: Any, inputs: Any, output: Any) -> None:
        boundaries[number] = sum(leaf.nbytes for leaf in _tensors(output))
        for leaf in _tensors(output):
            if leaf.requires_grad:
                leaf.register_hook(lambda gradient: ledger.mark(BACKWARD, number))
        ledger.mark(LEFT, number)

    unit.register_forward_pre_hook(enters, with_kwargs=True)
    unit.register_forward_hook(leaves)


def _gradient(ledger: Ledger, number: int, parameter: Tensor) -> None:
    parameter.grad = None
    ledger.mark(GRADIENT, number)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _explained(task: Task, what: str) -> Iterator[None]:
    """Context that explains why a model cannot do `what` on fake tensors."""
    try:
        yield
    except GrappeError:
        raise
    except Exception as error:
        raise TaskError(
            f"{type(task).__name__} cannot {what} without values, so nothing can be said before it runs: "
            f"{user_code.sentence(error)}. Look at tensors' shapes alone, not at their values; or measure it: "
            "grappe measure"
        ) from error
