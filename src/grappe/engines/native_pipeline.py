"""Pipelines of the native engine: this process's stages, and a step's gradients in the order of a schedule."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe.data.batch import Batch, Microbatch, stored_in
from grappe.data.collate import at_rows
from grappe.data.sampling import cut
from grappe.data.whole_batch_draws import whole_batch_draws
from grappe.engines.base import EngineSetup
from grappe.engines.shared.carried import nothing_changed
from grappe.engines.shared.microbatch import MicrobatchRunner
from grappe.engines.shared.state import ModelState, State, export, trained_parameters
from grappe.errors import PlanError
from grappe.errors.user_code import method_error
from grappe.launch.fork import run_in_fork
from grappe.parallel.activation_checkpointing import checkpoint_activations
from grappe.parallel.batchnorm import buffers_agreed, buffers_restored
from grappe.parallel.materialise import on_meta
from grappe.parallel.parallelize import parallelize
from grappe.parallel.pipeline.cut import check_units, cut_into_stages, pipeline_units
from grappe.parallel.pipeline.rules import stages_each
from grappe.parallel.pipeline.schedules import Runner
from grappe.parallel.pipeline.stage import Relay, Stage, StageGenerators, key_of, prune
from grappe.parallel.shard import reshard
from grappe.plan import Plan
from grappe.private_api.torch import BatchNormBase
from grappe.profiling.phases import BACKWARD, FORWARD
from grappe.step.clip import gradient_norm
from grappe.step.closure import needs_closure
from grappe.step.fast_paths import seed_dropout
from grappe.step.loss import Sums, loss_reduction
from grappe.step.precision import LossScale, autocast
from grappe.step.scores import Scorer, Scores
from grappe.step.whole_batch_loss import WholeBatchLosses
from grappe.task import overrides


class PipelinedGradients:
    """Runs a step's microbatches through all stages, and sums the gradients over replicas of the pipeline."""

    def __init__(self, setup: EngineSetup, model: StagedModel, loss_scale: LossScale) -> None:
        self._setup, self._model = setup, model
        plan, world = setup.plan, setup.world
        self._place = world.coordinates()["pipeline"][0]
        self._parameters = [parameter for _, parameter in model.named]
        self._reduction = loss_reduction(world, summed_in=stored_in(plan))
        # Gradients are summed, by replicas too. The last stage alone has the loss; the reduction starts after the step.
        self._precision = autocast(plan.precision, world.device)
        self._loss_runner = MicrobatchRunner(
            setup, model.module, _no_forward, loss_scale=loss_scale, precision=self._precision
        )
        if setup.task.whole_batch_loss and len(model.stages) > 1:
            raise PlanError(
                f"schedule={plan.schedule} with whole_batch_loss: stages of one process take turns in another order "
                "than in the pass that gives the loss its outputs, and dropout would differ: take schedule=1f1b"
            )
        # Parameters and gradients of zero=1 are whole during a step: torch's stages then reduce them at its end.
        held = plan.uses_fsdp and plan.zero == 1
        self._runner = Runner(plan.schedule, model.relay, world.device, self._loss, held)
        # Forwards have collectives: a process that alone sees a new shape would send it through without the others.
        together = plan.uses_fsdp or plan.synchronises
        self._together = together and world.data_group is not None
        self._replicas = None if plan.uses_fsdp else world.data_group
        self._batch: Batch | None = None
        self._generators = StageGenerators(model.relay, world)
        for stage in model.stages:  # what a schedule does between two forwards is backward, but for its waits
            stage.register_forward_pre_hook(lambda *_: setup.observers.phase(FORWARD))
            stage.register_forward_hook(lambda *_: setup.observers.phase(BACKWARD))

    def gradients(self, batch: Batch) -> Sums:
        """Leaves the global batch's gradient on each parameter; returns the step's (pending) sums. Collective."""
        plan = self._setup.plan
        micros = even(batch.microbatches, largest(plan, batch.samples))
        is_new = not self._model.relay.knows(micros[0])
        if self._together:
            flag = torch.tensor(float(is_new))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._setup.world.control)
            is_new = bool(flag)
        if is_new:
            # Every stage must know its input's shapes before a schedule is made for them. Not by a loop, whose
            # variable would keep the output in memory during the step.
            watch = self._loss_runner.watch
            with buffers_restored(self._model.module), watch.undone(), watch.watching(micros[0].size):
                deque(self._model.relay.forward([micros[0]]), maxlen=0)
            self._model.reshard()
        self._batch, self._loss_runner.total = batch._replace(microbatches=micros), None
        with self._drawing(self._batch):
            if isinstance(self._loss_runner.losses, WholeBatchLosses):
                self._first_pass(self._batch, self._loss_runner.losses)
            self._runner.run(micros)
        self._batch = None
        if self._replicas is not None:
            sum_gradients(self._parameters, self._replicas)
        # Only the last stage has the loss, but the reduction divides by the stages: multiply by them.
        total = self._loss_runner.total
        total = total * plan.pipeline if total is not None else self._reduction.zero
        self._reduction.start(total, self._setup.stop.flag)
        return self._reduction.sums()

    @contextlib.contextmanager
    def _drawing(self, batch: Batch) -> Iterator[None]:
        """Context of a step's passes through the stages: dropout is that of one process, if the plan has it so."""
        setup, device = self._setup, self._setup.world.device
        if not setup.plan.draws_whole_batches:
            seed_dropout(setup.task.seed, batch.step, device, setup.world.data_rank, self._place)
            yield
            return
        seed = functools.partial(seed_dropout, setup.task.seed, batch.step, device, 0)
        with whole_batch_draws(batch.microbatches[0].place), self._generators.of_step(seed):
            yield

    def _first_pass(self, batch: Batch, losses: WholeBatchLosses) -> None:
        """Runs all microbatches forward through all stages, for their outputs; no state changes. Collective."""
        with nothing_changed(self._model.module, self._setup.world.device):
            outputs = [output for _, output in self._model.relay.forward(batch.microbatches)]
            if outputs:
                with self._precision:
                    losses.look_ahead(batch, outputs, self._loss_runner.scale)
        self._model.reshard()

    def norm(self) -> Tensor:
        """Computes the 2-norm of the whole gradient, over all stages. Collective."""
        group = self._model.relay.group
        if not self._parameters:  # all that this stage has is frozen
            square = torch.zeros((), dtype=torch.float64, device=self._setup.world.device)
            dist.all_reduce(square, group=group)
            return square.sqrt().to(stored_in(self._setup.plan))
        return gradient_norm(self._parameters, group)

    def _loss(self, output: Any, micro: Microbatch) -> Tensor:
        """Computes a microbatch's loss on the last stage: a scalar from which backward starts."""
        assert self._batch is not None
        return self._loss_runner.loss_of(output, self._batch, micro)[0].scalar()


def _no_forward(inputs: Any) -> Any:
    raise AssertionError("a pipeline's schedule runs the forward")


class StagedModel:
    """Holds the units of this process's stages only; their parameters keep the model's names."""

    copies = None
    """None: optimizers that call a closure are refused."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        task, plan, world = setup.task, setup.plan, setup.world
        if overrides(task, "after_step"):
            raise method_error(
                task,
                "after_step",
                f"cannot run under pipeline={plan.pipeline}: no process has the whole model, and a parameter may be on "
                "another process than the one it follows. Use shard=, which splits each parameter",
            )
        if setup.sample_inputs is not None:
            example, kind = setup.sample_inputs, stored_in(plan)
            world.first(lambda: run_in_fork(lambda: check_units(task, example, kind)))
        sketch = on_meta(task, stored_in(plan))
        parts = cut_into_stages(task, sketch, plan.pipeline * stages_each(plan), setup.sample_inputs)
        if any(isinstance(module, BatchNormBase) for module in sketch.modules()) and setup.samples:
            check_even(plan, task.batch_size, setup.samples)
        self._everywhere = trained_parameters(sketch)
        self.stages: list[Stage] = []

        def keep(model: nn.Module, _: list[nn.Module]) -> list[tuple[Stage, list[nn.Module]]]:
            units = pipeline_units(task, model)
            checkpoint_activations(units, plan)
            place = world.coordinates()["pipeline"][0]
            kept = {
                number: [units[unit] for unit in parts[number]] for number in range(place, len(parts), plan.pipeline)
            }
            own = [unit for several in kept.values() for unit in several]
            prune(model, own, [unit for unit in units if unit not in own])
            for number, several in kept.items():
                precision = autocast(plan.precision, world.device)
                self.stages.append(Stage(several, number, len(parts), precision, task.forward))
            return [*zip(self.stages, kept.values(), strict=True)]

        self.module = parallelize(task, plan, world, setup.weights, keep)
        self.named = trained_parameters(self.module)
        self.relay = Relay(self.stages, world)

    def make_optimizer(self) -> Optimizer:
        """Makes the optimizer over the whole model, which the task may need, then removes other stages' parameters."""
        everywhere, self._everywhere = self._everywhere, []
        own_parameters, device = dict(self.named), self._setup.world.device
        optimizer = self._setup.task.optimizer(
            [
                (name, own_parameters[name] if name in own_parameters else _stand_in(parameter, device))
                for name, parameter in everywhere
            ]
        )
        if needs_closure(optimizer):
            raise PlanError(
                f"{type(optimizer).__name__} computes several gradients a step by a closure, and looks at all "
                "parameters together, which a pipeline's processes do not have: use shard= or replicate= instead"
            )
        own = {id(parameter) for parameter in own_parameters.values()}
        for group in optimizer.param_groups:
            kept = [number for number, parameter in enumerate(group["params"]) if id(parameter) in own]
            for key in {"params", "param_names"} & set(group):
                group[key] = [group[key][number] for number in kept]
        for parameter in [held for held in optimizer.state if id(held) not in own]:
            del optimizer.state[parameter]
        return optimizer

    def train_state(self, optimizer: Optimizer, schedule: LRScheduler | None, loss_scale: LossScale) -> StagedState:
        """Returns the TrainState of all stages."""
        return StagedState(
            self.relay.group,
            model=self.module,
            optimizer=optimizer,
            schedule=schedule,
            world=self._setup.world,
            loss_scale=loss_scale,
        )

    def reshard(self) -> None:
        """Frees gathered parameters."""
        for stage in self.stages:
            reshard(stage)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """Computes the scores over all data slices, on every process. Collective."""
        world = self._setup.world
        scorer = Scorer(self._setup.task, self._setup.plan, world)
        precision = autocast(self._setup.plan.precision, world.device)
        modules = [self.module, *self.stages]
        for module in modules:
            module.eval()
        try:
            group = world.data_group
            agreed = contextlib.nullcontext() if group is None else buffers_agreed(self.module, group)
            with agreed, self._setup.carried.apart():
                waiting: deque[Batch] = deque(maxlen=None if self.stages[-1].is_last else 0)
                for micro, output in self.relay.forward(_microbatches(batches, waiting)):
                    with precision:
                        scorer.add(output, micro, waiting[0])
                    if micro is waiting[0].microbatches[-1]:
                        waiting.popleft()
        finally:
            for module in modules:
                module.train()
        self.reshard()
        scores = scorer.scores(samples) if self.stages[-1].is_last else None
        return next(gathered for gathered in world.gather(scores) if gathered is not None)


class StagedState(ModelState):
    """The TrainState of all stages together.

    Args:
        group: the processes that hold the model's stages.
    """

    def __init__(self, group: dist.ProcessGroup, **parts: Any) -> None:
        super().__init__(**parts)
        self._group = group

    def state(self) -> State:
        """Returns this process's tensors, and every stage's JSON. Collective."""
        state = super().state()
        merged: dict[str, Any] = {}
        for values in self._world.gather(state.values["optimizer"]):
            merged.update(values)
        return State(tensors=state.tensors, local=state.local, values={**state.values, "optimizer": merged})

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields, on process 0, every stage's tensors; on other processes, their own stages' tensors. Collective."""
        ranks = dist.get_process_group_ranks(self._group)
        own_place = self._world.coordinates()["pipeline"][0]
        names = [*dict(self._model.named_parameters()), *dict(self._model.named_buffers())]
        listed = self._world.gather(names)
        for place, rank in enumerate(ranks):
            if place == own_place:
                for name, tensor in export(self._model, self._world):
                    if place and self._world.rank == rank and ranks[0] == 0:
                        dist.send_object_list([tensor.shape, tensor.dtype], dst=0, group=self._world.control)
                        dist.send(tensor.contiguous(), dst=0, group=self._world.control)
                    yield name, tensor
            elif self._world.rank == 0:
                for name in listed[rank]:
                    box: list[Any] = [None, None]
                    dist.recv_object_list(box, src=rank, group=self._world.control)
                    tensor = torch.empty(box[0], dtype=box[1])
                    dist.recv(tensor, src=rank, group=self._world.control)
                    yield name, tensor


def _microbatches(batches: Iterator[Batch], waiting: deque[Batch]) -> Iterator[Microbatch]:
    """Yields the microbatches of all batches; appends each batch to `waiting`."""
    for batch in batches:
        waiting.append(batch)
        yield from batch.microbatches


def _stand_in(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Returns a tensor of the same shape without memory, on a device that optimizers accept."""
    return nn.Parameter(torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape))


def even(micros: Sequence[Microbatch], rows: int) -> tuple[Microbatch, ...]:
    """Pads microbatches to `rows` rows each; padding rows count 0.

    Raises:
        PlanError: the microbatches differ in more than the number of rows.
    """
    padded = tuple(_padded(micro, rows) for micro in micros)
    shapes = {key_of(micro.inputs) for micro in padded}
    if len(shapes) > 1:
        several = ", ".join(sorted({str(list(leaf[0])) for key in shapes for leaf in key[1:]}))
        raise PlanError(
            f"a pipeline's microbatches must have one shape, and a step had {several}: "
            "let collate() pad every sample to the same length"
        )
    return padded


def largest(plan: Plan, samples: int) -> int:
    """Returns the rows of the largest microbatch of a step of `samples` samples, on any process."""
    return max(1, *(rows for part in range(plan.data_parallel) for rows in _pieces(plan, samples, part)))


def _pieces(plan: Plan, samples: int, part: int) -> list[int]:
    """Returns the rows of each microbatch of a slice."""
    first, last = cut(samples, plan.data_parallel, part)
    bounds = (cut(last - first, plan.microbatches, number) for number in range(plan.microbatches))
    return [b - a for a, b in bounds]


def _padded(micro: Microbatch, rows: int) -> Microbatch:
    missing = rows - micro.size
    if not missing:
        return micro
    # Repeats the last row: it is the only input that the model is certain to accept.
    places = [*range(micro.size), *[micro.size - 1] * missing]
    weights = micro.weights
    if isinstance(weights, Mapping):
        weights = {name: _with_zeros(rows, micro, missing, name) for name, rows in weights.items()}
    elif weights is not None:
        weights = _with_zeros(weights, micro, missing)
    inputs, targets = at_rows((micro.inputs, micro.targets), places, micro.size)
    drawn_for = micro.sample_ids
    if drawn_for is not None:
        drawn_for = drawn_for._replace(ids=drawn_for.ids[places])
    place = micro.place and micro.place._replace(size=rows)
    return Microbatch(inputs, targets, micro.rows, weights, rows - micro.rows, drawn_for, place)


def _with_zeros(weights: Tensor, micro: Microbatch, missing: int, name: str = "") -> Tensor:
    if name and len(weights) != micro.size:
        raise PlanError(
            f"a pipeline's microbatches must have one size, and one of {micro.size} samples would be padded with "
            f"rows that count nothing: counts() has no row for each sample for {name!r}. Choose a batch_size that "
            "microbatches= divides, also what is left for an epoch's last step"
        )
    return torch.cat([weights, weights.new_zeros(missing, *weights.shape[1:])])


def check_even(plan: Plan, batch_size: int, samples: int) -> None:
    """Rejects padding rows if they would enter batch normalisation's statistics.

    Args:
        samples: the number of training samples.

    Raises:
        PlanError: a step's samples do not divide evenly.
    """
    for step in {min(batch_size, samples), samples % batch_size} - {0}:
        for part in range(plan.data_parallel):
            rows = set(_pieces(plan, step, part))
            if len(rows) > 1 or 0 in rows:
                raise PlanError(
                    f"a step of {step} samples (of {samples:,} in batches of {batch_size}) does not divide into "
                    f"{plan.data_parallel} x microbatches={plan.microbatches} pieces of one even size. A "
                    "pipeline would fill them with rows that enter batch normalisation's statistics: choose another "
                    "batch_size or microbatches, or a model without batch normalisation"
                )


BUCKET_BYTES = 25_000_000  # as DistributedDataParallel's


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sums each parameter's gradient over `group`; a gradient that no process has stays None. Collective.

    DistributedDataParallel is not used: its hooks need one forward before each backward, and do not support a backward
    that computes gradients of inputs and of weights separately.
    """
    missing = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
    present = torch.ones(len(parameters), device=parameters[0].device)
    present[missing] = 0.0
    agreement = dist.all_reduce(present, group=group, async_op=True)
    for number in missing:
        parameters[number].grad = torch.zeros_like(parameters[number])
    flights = []
    for bucket in _buckets(parameters):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        flights.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
    for work, flat, bucket in flights:
        work.wait()
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, part in zip(bucket, flat.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))
    agreement.wait()
    for number in missing:
        if not present[number]:
            parameters[number].grad = None


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        if bucket and (size >= BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket
