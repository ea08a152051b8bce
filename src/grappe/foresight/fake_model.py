"""Fake model: a task's model, optimizer and batches on fake tensors, from which steps are traced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.data.batch import Batch, Microbatch, stored_in
from grappe.data.collate import at_rows
from grappe.data.corpus.corpus import Corpus
from grappe.data.corpus.mixture import Mixture
from grappe.data.datasets import dataset_of
from grappe.data.loader import BatchLoader, evaluation_loader, training_loader
from grappe.data.sampling import cut
from grappe.data.stream import head
from grappe.domain.batches import cut_batch
from grappe.domain.parts import Domain
from grappe.errors import DataNotFound, GrappeError, PlanError, TaskError, user_code
from grappe.foresight.kernels import Kernels
from grappe.foresight.memory import sharded_with, stepped
from grappe.foresight.pipeline_trace import Boundaries, stages_of, traced_evaluation, traced_step
from grappe.foresight.trace import CPU, Trace, TracedHost, traced, with_kernels
from grappe.launch.rank import ProcessRank
from grappe.launch.world import AXES, World
from grappe.optimizers.common import has_modes
from grappe.parallel.activation_checkpointing import Host, checkpoint_activations, switch_off_caches
from grappe.parallel.batchnorm import synchronise_batchnorm
from grappe.parallel.materialise import give_memory, on_meta
from grappe.parallel.pipeline.cut import Cut, check_without_values, pipeline_units
from grappe.parallel.units import blocks_of, units_of
from grappe.plan import Plan
from grappe.private_api.torch import fake_store, fake_tensors, forget_meshes, tree_map
from grappe.step.task_contract import optimizer_of
from grappe.task import Task, overrides

T = TypeVar("T")
ONE_PROCESS = Plan()
SAMPLES = 16  # read from the data; larger batches repeat them
COLLATED = 512  # at most, where the task's collate may pad samples to the longest


class Batches:
    """Batches of any number of samples, from a few that are read.

    Args:
        plain: a plan of one process, whose precision they have.
        fake: whether they are of the task's fake_data().
    """

    def __init__(
        self, task: Task, data: Path, mode: Any, plain: Plan, split: str = "train", *, fake: bool = False
    ) -> None:
        dataset, self._plain = head(dataset_of(task, split, data, fake=fake), COLLATED), plain
        self.kept: int = dataset.memory() if isinstance(dataset, Corpus | Mixture) else 0
        """Bytes of blocks that a process that loads samples keeps, at most."""
        self._task, self._dataset, self._mode, self._trains = task, dataset, mode, split == "train"
        self.samples = len(dataset)
        self._world = World(process=ProcessRank(), device=CPU)
        self._read = self._rehearsed(min(SAMPLES, self.samples))
        self.example = self._loader(2).example()
        """The inputs of one or two samples, by which a pipeline's stages are cut."""

    def of(self, rows: int) -> Batch:
        """Makes a batch of `rows` samples, without values."""
        read, count = self._read, self._read.microbatches[0].size
        if rows != count and overrides(self._task, "collate") and rows <= min(COLLATED, self.samples):
            read = self._rehearsed(rows)
        elif rows != count:
            micro = read.microbatches[0]
            places = [number % count for number in range(rows)]
            try:
                inputs, targets, weights = at_rows((micro.inputs, micro.targets, micro.weights), places, count)
            except PlanError:  # a batch of graphs, for example: it must be read
                read = self._rehearsed(rows)
            else:
                ids = micro.sample_ids
                if ids is not None:
                    ids = ids._replace(ids=ids.ids[np.array(places)])
                made = Microbatch(inputs, targets, rows, weights, 0, ids)
                read = read._replace(microbatches=(made,), samples=rows)
        micro = read.microbatches[0]
        fake = tree_map(self.without_values, (micro.inputs, micro.targets, micro.weights))
        micro = micro._replace(inputs=fake[0], targets=fake[1], weights=fake[2])
        count_of = read.count if isinstance(read.count, float) else self.without_values(read.count)
        return read._replace(microbatches=(micro,), count=count_of)

    def _loader(self, rows: int) -> BatchLoader:
        task = dataclasses.replace(self._task, batch_size=rows)
        if self._trains:
            return training_loader(task, self._dataset, self._plain, self._world)
        plan = dataclasses.replace(self._plain, validation_batch=None if task.whole_batch_loss else rows)
        return evaluation_loader(task, self._dataset, plan, self._world)

    def _rehearsed(self, rows: int) -> Batch:
        return next(self._loader(min(rows, self.samples)).rehearsed())

    def without_values(self, leaf: Any) -> Any:
        """Returns a leaf of the data without its values."""
        return self._mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slices:
    """Slices of a global batch, as far as the forward and the loss of a process's microbatch depend on them."""

    ways: int = 1
    """Processes that have slices of the global batch, and are asked for theirs."""
    micros: tuple[int, ...] = ()
    """Samples of each microbatch of the first slice, where the loss needs all of them; else empty."""
    samples: int = 0
    """Samples of the global batch; 0: they do not matter."""
    synchronised: bool = False
    """Whether batch normalisation has the statistics of all slices."""


ALONE = Slices()
"""A microbatch depends on itself alone."""


class Part(NamedTuple):
    """A process's part of each sample, under domain=."""

    number: int = 0
    of: int = 1


UNCUT = Part()


def slices_of(task: Task, plan: Plan, samples: int, dataset: int) -> Slices:
    """Returns what the microbatches of a step of `samples` samples depend on, of a data set of `dataset`."""
    if not task.whole_batch_loss:
        return Slices(ways=plan.data_parallel, synchronised=True) if plan.synchronises else ALONE
    samples = min(samples, dataset)
    first, last = cut(samples, plan.data_parallel, 0)
    bounds = (cut(last - first, plan.microbatches, number) for number in range(plan.microbatches))
    return Slices(
        ways=plan.data_parallel,
        micros=tuple(end - begin for begin, end in bounds if end > begin),
        samples=samples,
        synchronised=plan.synchronises,
    )


@contextlib.contextmanager
def explaining_trace_errors(task: Task, what: str) -> Iterator[None]:
    """Context that explains why a model cannot do `what` on fake tensors."""
    try:
        yield
    except GrappeError:
        raise
    except Exception as error:
        raise TaskError(
            f"{type(task).__name__} cannot {what} without values, so grappe cannot predict it before it runs: "
            f"{user_code.sentence(error)}. Use only tensors' shapes, not their values; or measure it: "
            "grappe measure"
        ) from error


@contextlib.contextmanager
def pretended(plan: Plan, part: int = 0) -> Iterator[World]:
    """Context with the world of the first process of a plan's replicate and tensor axes; not inside a training.

    Args:
        part: number of the process in the domain axis.
    """
    size, rank = plan.replicate * plan.domain * plan.tensor, part * plan.tensor
    process = ProcessRank(rank=rank, size=size, local_rank=rank, local_size=size)
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=size)
    domain: Domain | None = None
    try:
        mesh = dist.init_device_mesh("cpu", (1, plan.replicate, 1, plan.domain, plan.tensor), mesh_dim_names=AXES)
        group = mesh["domain"].get_group()
        domain = Domain(group=group, summed=group, rank=part, size=plan.domain) if plan.domain > 1 else None
        if domain is not None:
            domain.enter()
        yield World(
            process=process,
            device=torch.device("cpu"),
            mesh=mesh,
            data_size=plan.replicate,
            data_group=mesh["replicate"].get_group() if plan.replicate > 1 else None,
            domain=domain,
        )
    finally:
        if domain is not None:
            domain.leave()
        dist.destroy_process_group()
        forget_meshes()


class FakeModel:
    """A task's model and optimizer without memory; made once, traced for each size of microbatch.

    Args:
        data: the folder of datasets.
        foreach: whether the optimizer steps all parameters at once, as it does on a GPU.
        kernels: what kernels take beyond their output; None: nothing, as on a device that is not here.
        records: whether traces of training steps record their operators, from which times are foreseen.
        plain: a plan of one process, whose parameters' type the model has.

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
        plain: Plan = ONE_PROCESS,
    ) -> None:
        self.task, self.kernels, self._data, self._records = task, kernels, data, records
        self._foreach, self._plain = foreach, plain
        self.mode: Any = fake_tensors()
        with user_code.naming_user_line(task):
            self.batches, self.absent = self._read_or_faked()
        with explaining_trace_errors(task, "be made"):
            self.plain = on_meta(task, stored_in(plain))
            model = self._build_model()
            if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse for module in model.modules()):
                raise TaskError(
                    f"{type(task).__name__} has sparse gradients (nn.Embedding(sparse=True)), whose size depends on "
                    "the data: their memory is not foreseen; grappe measure runs it"
                )
            self._blocks = blocks_of(task, self.batches.example).names
            homes = sharded_with(model, self.units(model))
            self.buffers = sum(buffer.nbytes for buffer in model.buffers())
        with explaining_trace_errors(task, "be stepped by its optimizer"), self.mode:
            named = list(model.named_parameters())
            optimizer = optimizer_of(task, [pair for pair in named if pair[1].requires_grad])
            self.has_modes = has_modes(optimizer)
            self.parameters, self.together = stepped(optimizer, named, homes, foreach)
        self.samples = self.batches.samples

    def _read_or_faked(self) -> tuple[Batches, str]:
        """Returns training batches; of fake_data() where the data are not there, and why they are not."""
        task = self.task
        try:
            return Batches(task, self._data, self.mode, self._plain), ""
        except GrappeError as error:
            if not isinstance(error, DataNotFound) and not isinstance(error.__cause__, FileNotFoundError):
                raise
            if overrides(task, "fake_data"):
                return Batches(task, self._data, self.mode, self._plain, fake=True), str(error)
            raise TaskError(
                f"{error}. To foresee it without its data, write fake_data(self, split) in the task: zeros of their "
                "shapes"
            ) from error

    def of(self, plan: Plan) -> FakeModel:
        """Returns the fake model with the parameters' type of `plan`."""
        return self if stored_in(plan) == stored_in(self._plain) else self._in_float64

    @functools.cached_property
    def _in_float64(self) -> FakeModel:
        kinds = {"foreach": self._foreach, "kernels": self.kernels, "records": self._records}
        return FakeModel(self.task, self._data, **kinds, plain=Plan(precision="fp64"))

    @functools.lru_cache(maxsize=128)  # noqa: B019 - as long as the fake model
    def trace(
        self,
        rows: int,
        precision: str = "fp32",
        recompute: bool | str = False,
        threads: int = 1,
        tensor: int = 1,
        slices: Slices = ALONE,
        part: Part = UNCUT,
        *,
        trains: bool = True,
    ) -> Trace:
        """Traces a microbatch of `rows` samples, in a process of `threads` threads.

        Args:
            tensor: processes that share the model's matrices.
            slices: what it depends on other than itself.
            part: what the process holds of each sample.
            trains: whether backward follows; else it is an evaluation of validation samples, without gradients.
        """
        plan = dataclasses.replace(
            self._plain, recompute=recompute, tensor=tensor, replicate=slices.ways, domain=part.of
        )
        batch = self._cut(self.batches if trains else self._validation, rows, slices)

        def run(model: nn.Module, world: World) -> Trace:
            units, own = self.units(model.train(trains)), batch
            if world.domain is not None:  # this process's part of each sample
                [micro] = batch.microbatches
                inputs, targets = cut_batch(self.task, micro.inputs, micro.targets)
                own = batch._replace(microbatches=(micro._replace(inputs=inputs, targets=targets),))
            hosts = self._checkpointed(model, units or [model], plan)
            if slices.synchronised and world.data_group is not None:
                synchronise_batchnorm(model, world.data_group)
            with self.mode, torch.set_grad_enabled(trains):
                trace = traced(
                    self.task,
                    model,
                    units,
                    own,
                    precision,
                    plan,
                    world,
                    describes=self.kernels is not None,
                    records=self._records and trains,
                    trains=trains,
                )
            return dataclasses.replace(trace, moved=tuple(host.moved for host in hosts))

        trace = self._run(plan, "run" if trains else "be evaluated", run, part.number)
        return with_kernels(trace, self.kernels, threads)

    @functools.lru_cache(maxsize=32)  # noqa: B019 - as long as the fake model
    def passes(
        self, plan: Plan, cut: Cut, rows: int, threads: int, slices: Slices = ALONE, *, trains: bool = True
    ) -> tuple[Trace, ...]:
        """Traces the passes of each process of a pipeline, with microbatches of `rows` samples.

        Args:
            slices: what a microbatch depends on other than itself.
            trains: whether they are of a step; else each stage is traced in an evaluation of validation samples.
        """
        batch, describes = (self.batches if trains else self._validation).of(rows), self.kernels is not None

        def run(model: nn.Module, world: World) -> list[Trace]:
            units = pipeline_units(self.task, model)
            hosts = self._checkpointed(model, units, plan)
            stages = stages_of(self.task, units, cut, plan.precision)
            with self.mode:
                for stage in stages:
                    stage.train(trains)
                    if slices.synchronised and world.data_group is not None:
                        synchronise_batchnorm(stage, world.data_group)
                bounds = Boundaries(stages, batch)
                if trains:
                    traces = [
                        traced_step(
                            self.task, stages, bounds, batch, plan, place, describes=describes, records=self._records
                        )
                        for place in range(plan.pipeline)
                    ]
                else:
                    traces = [
                        traced_evaluation(self.task, stages, number, bounds, batch, describes=describes)
                        for number in range(len(stages))
                    ]
            moved = tuple(host.moved for host in hosts)
            return [dataclasses.replace(trace, moved=moved) for trace in traces]

        traces = self._run(Plan(replicate=slices.ways), "run" if trains else "be evaluated", run)
        return tuple(with_kernels(trace, self.kernels, threads) for trace in traces)

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Returns the units of a model of the task, as a training without a pipeline has them."""
        return units_of(self.task, model, self._blocks)

    def check_units(self) -> None:
        """Checks that a pipeline's units make up the model, as far as can be seen without values.

        Raises:
            PlanError: they are not.
        """
        if self._units_problem is not None:
            raise self._units_problem

    @functools.cached_property
    def _units_problem(self) -> PlanError | None:
        model = self._build_model()
        try:
            with self.mode:
                check_without_values(self.task, model, tree_map(self.batches.without_values, self.batches.example))
        except PlanError as error:
            return error
        except Exception:  # the model cannot run without values: its traces say why
            return None
        return None

    def _checkpointed(self, model: nn.Module, units: Sequence[nn.Module], plan: Plan) -> tuple[Host, ...]:
        if not plan.recompute:
            return ()
        switch_off_caches(model)
        return checkpoint_activations(units, plan, TracedHost if self._foreach else Host)

    def _cut(self, batches: Batches, rows: int, slices: Slices) -> Batch:
        """Makes a batch of one microbatch of `rows` samples, or of all of the first slice's."""
        batch = batches.of(rows)
        if not slices.micros:
            return batch
        micros = tuple(batches.of(size).microbatches[0] for size in slices.micros)
        count = float(slices.samples) if isinstance(batch.count, float) else batch.count
        return batch._replace(microbatches=micros, samples=slices.samples, count=count)

    def _run(self, plan: Plan, what: str, run: Callable[[nn.Module, World], T], part: int = 0) -> T:
        """Runs a model as on the first process of the replicate and tensor axes; twice where it is split.

        The first run finds out how each operator is split, on tensors which no training has.
        """
        with explaining_trace_errors(self.task, what):
            if plan.processes == 1:
                return run(self._build_model(), World(process=ProcessRank(), device=CPU))
            with pretended(plan, part) as world:
                if plan.tensor > 1:
                    run(self._build_model(plan, world), world)
                return run(self._build_model(plan, world), world)

    @functools.cached_property
    def _validation(self) -> Batches:
        return Batches(self.task, self._data, self.mode, self._plain, "validation", fake=bool(self.absent))

    @property
    def validation_samples(self) -> int:
        """Returns the number of validation samples."""
        return self._validation.samples

    def _build_model(self, plan: Plan = ONE_PROCESS, world: World | None = None) -> nn.Module:
        model = on_meta(self.task, stored_in(self._plain))
        if plan.tensor > 1 and world is not None:
            from grappe.parallel.tensor import split_tensors

            split_tensors(model, self.task, plan, world)
        with self.mode:
            give_memory(model, CPU)
        return model.train()
