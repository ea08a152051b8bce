"""Sketch: a task's model, optimizer and batches on fake tensors, from which steps are traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grappe.data.batch import Batch
from grappe.errors import PlanError
from grappe.errors.user_code import naming_user_line
from grappe.foresight.batches import Batches
from grappe.foresight.fake_group import pretended
from grappe.foresight.kernels import Kernels
from grappe.foresight.parameters import sharded_with, stepped
from grappe.foresight.pipeline_trace import Boundaries, stages_of, traced_evaluation, traced_step
from grappe.foresight.refusals import explained, refuse_sparse
from grappe.foresight.slices import ALONE, Slices
from grappe.foresight.trace import CPU, Trace, traced, with_kernels
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.optimizers.modes import has_modes
from grappe.parallel.activation_checkpointing import checkpoint_activations, switch_off_caches
from grappe.parallel.batchnorm import synchronise_batchnorm
from grappe.parallel.materialise import give_memory, on_meta
from grappe.parallel.pipeline.check import check_without_values
from grappe.parallel.pipeline.cut import Cut
from grappe.parallel.pipeline.stage import Stage
from grappe.parallel.pipeline.units import pipeline_units
from grappe.parallel.tensor import split_tensors
from grappe.plan import Plan
from grappe.private_api.torch import fake_tensors
from grappe.step.task_contract import optimizer_of
from grappe.task import Task


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
        with explained(task, "be made"):
            self.plain = on_meta(task)
            model = self._made()
            refuse_sparse(task, model)
            homes = sharded_with(model, task.units(model))
            self.buffers = sum(one.nbytes for one in model.buffers())
        with explained(task, "be stepped by its optimizer"), self.mode:
            optimizer = optimizer_of(
                task, [(name, one) for name, one in model.named_parameters() if one.requires_grad]
            )
            self.has_modes = has_modes(optimizer)
            self.parameters, self.together = stepped(
                optimizer, list(model.named_parameters()), homes, foreach
            )
        self.samples = self._batch.samples

    @functools.lru_cache(maxsize=64)  # noqa: B019 - as long as the sketch
    def trace(
        self,
        rows: int,
        precision: str = "fp32",
        recompute: bool = False,
        threads: int = 1,
        tensor: int = 1,
        slices: Slices = ALONE,
    ) -> Trace:
        """Traces a microbatch of `rows` samples, in a process of so many threads.

        Args:
            tensor: processes that share the model's matrices.
            slices: what it depends on besides itself.
        """
        plan = Plan(recompute=recompute, tensor=tensor, replicate=slices.ways)
        batch = self._cut(self._batch, rows, slices)

        def run(model: nn.Module, world: World) -> Trace:
            inside, describes = list(self.task.units(model)), self._kernels is not None
            switch_off_caches(model, plan)
            checkpoint_activations(inside or [model], plan)
            if slices.synchronised and world.data_group is not None:
                synchronise_batchnorm(model, world.data_group)
            with self.mode:
                return traced(
                    self.task,
                    model,
                    inside,
                    batch,
                    precision,
                    plan,
                    world,
                    describes=describes,
                    records=self._records,
                )

        return self._completed(self._run(plan, "run", run), threads)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - as long as the sketch
    def evaluation(
        self,
        rows: int,
        precision: str = "fp32",
        threads: int = 1,
        tensor: int = 1,
        slices: Slices = ALONE,
    ) -> Trace:
        """Traces an evaluation of `rows` validation samples: a forward without gradients, and the loss."""
        plan, batch = (
            Plan(tensor=tensor, replicate=slices.ways),
            self._cut(self._validation, rows, slices),
        )

        def run(model: nn.Module, world: World) -> Trace:
            inside, describes = list(self.task.units(model.eval())), self._kernels is not None
            with self.mode, torch.no_grad():
                return traced(
                    self.task, model, inside, batch, precision, plan, world, describes=describes, trains=False
                )

        return self._completed(self._run(plan, "be evaluated", run), threads)

    @functools.lru_cache(maxsize=16)  # noqa: B019 - as long as the sketch
    def passes(
        self,
        plan: Plan,
        cut: Cut,
        rows: int,
        threads: int,
        slices: Slices = ALONE,
    ) -> tuple[Trace, ...]:
        """Traces the passes of each process of a pipeline, with microbatches of `rows` samples.

        Args:
            slices: what a microbatch depends on besides itself.
        """
        batch = self._batch.of(rows)
        stages = self._stages(plan, cut)
        alone = contextlib.nullcontext(World(process=ProcessRank(), device=CPU))
        world_of = pretended(Plan(replicate=slices.ways)) if slices.ways > 1 else alone
        with explained(self.task, "run"), world_of as world, self.mode:
            if slices.synchronised and world.data_group is not None:
                for stage in stages:
                    synchronise_batchnorm(stage, world.data_group)
            bounds = Boundaries(stages, batch)
            found = [
                traced_step(
                    self.task,
                    stages,
                    bounds,
                    batch,
                    plan,
                    place,
                    describes=self._kernels is not None,
                    records=self._records,
                )
                for place in range(plan.pipeline)
            ]
        return tuple(self._completed(one, threads) for one in found)

    @functools.lru_cache(maxsize=16)  # noqa: B019 - as long as the sketch
    def evaluated_stages(self, plan: Plan, cut: Cut, rows: int, threads: int) -> tuple[Trace, ...]:
        """Traces an evaluation of `rows` validation samples in each stage of a pipeline."""
        batch = self._validation.of(rows)
        stages = self._stages(plan, cut)
        with explained(self.task, "be evaluated"), self.mode:
            for stage in stages:
                stage.eval()
            bounds = Boundaries(stages, batch)
            found = [
                traced_evaluation(
                    self.task, stages, number, bounds, batch, describes=self._kernels is not None
                )
                for number in range(len(stages))
            ]
        return tuple(self._completed(one, threads) for one in found)

    def check_units(self) -> None:
        """Checks that a pipeline's units are the model, as far as it shows without values.

        Raises:
            PlanError: they are not.
        """
        if self._units_problem is not None:
            raise self._units_problem

    @functools.cached_property
    def _units_problem(self) -> PlanError | None:
        model = self._made()
        try:
            with self.mode:
                check_without_values(self.task, model, self._batch.inputs())
        except PlanError as error:
            return error
        except Exception:  # the model cannot run without values: its traces say why
            return None
        return None

    def _stages(self, plan: Plan, cut: Cut) -> list[Stage]:
        model = self._made()
        switch_off_caches(model, plan)
        units = pipeline_units(self.task, model)
        checkpoint_activations(units, plan)
        return stages_of(self.task, units, cut, plan.precision)

    def _cut(self, batches: Batches, rows: int, slices: Slices) -> Batch:
        """Makes a batch of one microbatch of `rows` samples, or of all of the first slice's."""
        batch = batches.of(rows)
        if not slices.micros:
            return batch
        micros = tuple(batches.of(one).microbatches[0] for one in slices.micros)
        count = float(slices.samples) if isinstance(batch.count, float) else batch.count
        return batch._replace(microbatches=micros, samples=slices.samples, count=count)

    def _run(self, plan: Plan, what: str, run: Callable[[nn.Module, World], Trace]) -> Trace:
        """Runs a model as the first process of the replicate and tensor axes has it; twice where it is split.

        The first run finds out how each operator is split, on tensors which no training has.
        """
        with explained(self.task, what):
            if plan.processes == 1:
                return run(self._made(), World(process=ProcessRank(), device=CPU))
            with pretended(plan) as world:
                if plan.tensor == 1:
                    return run(self._made(), world)
                run(self._split(plan, world), world)
                return run(self._split(plan, world), world)

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
    def runs_kernels(self) -> bool:
        """Returns whether kernels are run on this machine, to measure their memory."""
        return self._kernels is not None

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
