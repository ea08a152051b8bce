"""Sketch: a task's model, optimizer and batches on fake tensors, from which steps are traced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from grappe.errors import GrappeError, TaskError, user_code
from grappe.errors.user_code import naming_user_line
from grappe.foresight.batches import Batches
from grappe.foresight.kernels import Kernels
from grappe.foresight.ledger import Ledger
from grappe.foresight.pretended import pretended
from grappe.foresight.staged import Boundaries, stages_of, traced_evaluation, traced_step
from grappe.foresight.trace import CPU, END, ROOT, Trace, tensors_of, traced, with_kernels
from grappe.launch.world import World
from grappe.optimizers.modes import has_modes
from grappe.parallel.activation_checkpointing import checkpoint_activations, switch_off_caches
from grappe.parallel.materialise import give_memory, on_meta
from grappe.parallel.pipeline.cut import Cut
from grappe.parallel.pipeline.stage import Stage
from grappe.parallel.pipeline.units import pipeline_units
from grappe.parallel.tensor import split_tensors
from grappe.plan import Plan
from grappe.private_api.torch import fake_tensors
from grappe.step.given import optimizer_of
from grappe.task import Task


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
    states: tuple[int, ...] = ()
    """Bytes of each tensor of the optimizer's state that has a number for each of the parameter's."""
    whole_states: tuple[int, ...] = ()
    """Bytes of each of its other tensors, a step count say, which are never split."""
    temporary: int = 0
    """Bytes that the optimizer needs while it steps this parameter."""

    @property
    def size(self) -> int:
        """Computes the parameter's bytes."""
        return self.item * math.prod(self.shape)


class Sketch:
    """A task's model and optimizer without memory; made once, traced for each size of microbatch.

    Args:
        data: the folder of datasets.
        foreach: whether the optimizer steps all parameters at once, as it does on a GPU.
        kernels: what kernels take besides their output; None: nothing, as on a device that is not here.
        records: whether traces of training steps record their operators, from which times are foreseen.

    Raises:
        TaskError: the model, the loss or the optimizer cannot run without values, or the task's own code fails.
    """

    def __init__(
        self,
        task: Task,
        data: Path,
        *,
        foreach: bool = False,
        kernels: Kernels | None = None,
        records: bool = False,
    ) -> None:
        self.task, self._kernels, self._data, self._records = task, kernels, data, records
        self.mode: Any = fake_tensors()
        with naming_user_line(task):
            self._batch = Batches(task, data, self.mode)
        with _explained(task, "be made"):
            self.plain = on_meta(task)
            model = self._made()
            homes = homes_of(task.units(model))
            self.buffers = sum(one.nbytes for one in model.buffers())
        with _explained(task, "be stepped by its optimizer"), self.mode:
            optimizer = optimizer_of(
                task, [(name, one) for name, one in model.named_parameters() if one.requires_grad]
            )
            self.has_modes = has_modes(optimizer)
            self.parameters, self.together = _stepped(
                optimizer, list(model.named_parameters()), homes, foreach
            )
        self.samples = self._batch.samples

    @functools.lru_cache(maxsize=64)  # noqa: B019 - as long as the sketch
    def trace(
        self, rows: int, precision: str = "fp32", recompute: bool = False, threads: int = 1, tensor: int = 1
    ) -> Trace:
        """Traces a microbatch of `rows` samples, in a process of so many threads.

        Args:
            tensor: processes that share the model's matrices.
        """
        plan, batch = Plan(recompute=recompute, tensor=tensor), self._batch.of(rows)

        def run(model: nn.Module) -> Trace:
            inside, describes = list(self.task.units(model)), self._kernels is not None
            switch_off_caches(model, plan)
            checkpoint_activations(inside or [model], plan)
            with self.mode:
                return traced(
                    self.task, model, inside, batch, precision, describes=describes, records=self._records
                )

        return self._completed(self._run(plan, "run", run), threads)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - as long as the sketch
    def evaluation(self, rows: int, precision: str = "fp32", threads: int = 1, tensor: int = 1) -> Trace:
        """Traces an evaluation of `rows` validation samples: a forward without gradients, and the loss."""
        batch = self._validation.of(rows)

        def run(model: nn.Module) -> Trace:
            inside, describes = list(self.task.units(model.eval())), self._kernels is not None
            with self.mode, torch.no_grad():
                return traced(self.task, model, inside, batch, precision, describes=describes, trains=False)

        return self._completed(self._run(Plan(tensor=tensor), "be evaluated", run), threads)

    @functools.lru_cache(maxsize=16)  # noqa: B019 - as long as the sketch
    def passes(self, plan: Plan, cut: Cut, rows: int, threads: int) -> tuple[Trace, ...]:
        """Traces the passes of each process of a pipeline, with microbatches of `rows` samples."""
        batch = self._batch.of(rows)
        stages = self._stages(plan, cut)
        with _explained(self.task, "run"), self.mode:
            bounds = Boundaries(stages, batch)
            found = [
                traced_step(
                    self.task, stages, bounds, batch, plan, place, describes=self._kernels is not None
                )
                for place in range(plan.pipeline)
            ]
        return tuple(self._completed(one, threads) for one in found)

    @functools.lru_cache(maxsize=16)  # noqa: B019 - as long as the sketch
    def evaluated_stages(self, plan: Plan, cut: Cut, rows: int, threads: int) -> tuple[Trace, ...]:
        """Traces an evaluation of `rows` validation samples in each stage of a pipeline."""
        batch = self._validation.of(rows)
        stages = self._stages(plan, cut)
        with _explained(self.task, "be evaluated"), self.mode:
            for stage in stages:
                stage.eval()
            bounds = Boundaries(stages, batch)
            found = [
                traced_evaluation(self.task, stage, bounds, batch, describes=self._kernels is not None)
                for stage in stages
            ]
        return tuple(self._completed(one, threads) for one in found)

    def _stages(self, plan: Plan, cut: Cut) -> list[Stage]:
        model = self._made()
        switch_off_caches(model, plan)
        units = pipeline_units(self.task, model)
        checkpoint_activations(units, plan)
        return stages_of(self.task, units, cut, plan.precision)

    def _run(self, plan: Plan, what: str, run: Callable[[nn.Module], Trace]) -> Trace:
        """Runs a model as a process of the tensor axis has it; the second time where it is split.

        The first run finds out how each operator is split, on tensors which no training has.
        """
        with _explained(self.task, what):
            if plan.tensor == 1:
                return run(self._made())
            with pretended(plan) as world:
                run(self._split(plan, world))
                return run(self._split(plan, world))

    def _split(self, plan: Plan, world: World) -> nn.Module:
        model = on_meta(self.task)
        split_tensors(model, self.task, plan, world)
        with self.mode:
            give_memory(model, CPU)
        return model.train()

    def _completed(self, found: Trace, threads: int) -> Trace:
        return found if self._kernels is None else with_kernels(found, self._kernels, threads)

    @functools.cached_property
    def _validation(self) -> Batches:
        return Batches(self.task, self._data, self.mode, "validation")

    @property
    def validation_samples(self) -> int:
        """Returns the number of validation samples."""
        return self._validation.samples

    @property
    def batches(self) -> Batches:
        """Returns the training batches."""
        return self._batch

    def example(self) -> Any:
        """Returns the inputs of one or two samples, by which a pipeline's stages are cut."""
        return self._batch.example

    def _made(self) -> nn.Module:
        model = on_meta(self.task)
        with self.mode:
            give_memory(model, CPU)
        return model.train()


def homes_of(units: Sequence[nn.Module]) -> dict[int, int]:
    """Returns the first unit of each parameter, by its id."""
    homes: dict[int, int] = {}
    for number, unit in enumerate(units):
        for one in unit.parameters():
            homes.setdefault(id(one), number)
    return homes


def _stepped(
    optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]], homes: dict[int, int], foreach: bool
) -> tuple[tuple[Parameter, ...], float]:
    """Steps the optimizer on one parameter after the other, and notes what each takes; then on all together.

    Returns:
        The parameters; and how many times the largest of their temporary bytes a step of all takes: Python keeps the
        last parameter's until the next has made its own, and foreach makes all at once.
    """
    trained = [(name, one) for name, one in named if one.requires_grad]
    for group in optimizer.param_groups:
        if foreach and group.get("foreach", False) is None:
            group["foreach"] = True
    found = []
    for name, one in named:
        split, whole, temporary = [], [], 0
        if one.requires_grad:
            one.grad = torch.empty_like(one)
            optimizer.step()  # makes the state
            values = tensors_of(dict(optimizer.state.get(one, {})))
            for value in values:
                (split if value.shape == one.shape and value.dim() else whole).append(value.nbytes)
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
                states=tuple(split),
                whole_states=tuple(whole),
                temporary=temporary,
            )
        )
    for _, one in trained:
        one.grad = torch.empty_like(one)
    held = [
        value
        for _, one in named
        for value in (one, one.grad, *tensors_of(dict(optimizer.state.get(one, {}))))
    ]
    ledger = Ledger([value for value in held if value is not None])
    with ledger:
        optimizer.step()
    ledger.mark(END)
    for _, one in trained:
        one.grad = None
    return tuple(found), ledger.marks[-1].peak / max(1, *(one.temporary for one in found))


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
