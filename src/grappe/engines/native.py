"""The native engine, on torch alone: DDP, FSDP2, tensor parallelism, pipelines and their products.

It reads in the order of a step: `Native.step` asks a strategy for the gradients, clips them and updates the parameters;
`WholeGradients` (or `ExactGradients`, or native_pipeline.py's) runs each microbatch by the
`MicrobatchRunner` of shared/microbatch.py, which other engines use too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe.data.batch import Batch, Microbatch, entering, stored_in
from grappe.domain import batches as domain_rules
from grappe.engines.base import COMMON, Engine, EngineSetup
from grappe.engines.shared.after_step import AfterStep
from grappe.engines.shared.carried import gather_state, nothing_changed
from grappe.engines.shared.microbatch import MicrobatchRunner, evaluate, within
from grappe.engines.shared.state import ModelState, trained_parameters
from grappe.errors import PlanError, TaskError
from grappe.errors.user_code import sentence
from grappe.optimizers.common import has_modes
from grappe.parallel import compile as compile_rules
from grappe.parallel.compile import replaying
from grappe.parallel.parallelize import KEYS, parallelize
from grappe.parallel.pipeline import rules as pipeline_rules
from grappe.parallel.replicate import Replicas
from grappe.parallel.shard import SameParameters, SummedGradients, reduction_switch
from grappe.plan import Plan
from grappe.profiling.phases import UPDATE
from grappe.step import exact as exact_rules
from grappe.step.clip import clipping, gradient_norm
from grappe.step.closure import ClosureStep, WholeCopies, copies_of, needs_closure
from grappe.step.cross_check import CrossCheck
from grappe.step.exact import exact_sums
from grappe.step.fast_paths import OptimizerStep, backward
from grappe.step.loss import NO_ROOTS, Loss, Losses, Roots, StepResult, Sums, loss_reduction
from grappe.step.precision import LossScale, autocast, set_gpu_arithmetic
from grappe.step.scores import Scores
from grappe.step.task_contract import optimizer_of, schedule_of
from grappe.task import overrides

if TYPE_CHECKING:
    from grappe.engines.native_pipeline import PipelinedGradients, StagedModel


class Native(Engine):
    """Updates the parameters; a strategy computes their gradients: whole, exact or pipelined."""

    sharded_units = True
    supported_keys = (
        COMMON | KEYS | {"domain", "cut", "pipeline", "schedule", "stages", "exact", "check", "cuda_graphs", "memory"}
    )
    about = "torch's own: DDP, FSDP2 (ZeRO 1-3), pipelines, tensor parallelism and their products"

    @classmethod
    def unsupported_reason(cls, plan: Plan) -> str | None:
        if plan.offload.startswith("nvme:"):
            return "engine=native offloads to the CPU only: use offload=cpu, or an engine with offload to disk"
        if plan.tensor > 1 and plan.batchnorm == "sync":
            return "batchnorm=sync with tensor parallelism is not supported: use batchnorm=local"
        if plan.domain > 1 and (why := domain_rules.unsupported_reason(plan)) is not None:
            return why
        rules = {"exact": exact_rules, "pipeline": pipeline_rules, "cuda_graphs": compile_rules}
        asked = [rule for key, rule in rules.items() if key in plan.changed_keys()]
        return next((why for rule in asked if (why := rule.unsupported_reason(plan))), None)

    def __init__(self, setup: EngineSetup) -> None:
        self._on_phase, self._plan, self._domain = setup.observers.phase, setup.plan, setup.world.domain
        set_gpu_arithmetic(setup.plan.precision)
        loss_scale = LossScale(setup.plan.precision)
        strategy: WholeGradients | ExactGradients | PipelinedGradients
        self._model: WholeModel | StagedModel
        if setup.plan.pipeline > 1:
            from grappe.engines.native_pipeline import PipelinedGradients, StagedModel

            self._model = StagedModel(setup)
            strategy = PipelinedGradients(setup, self._model, loss_scale)
        else:
            self._model = WholeModel(setup)
            make = ExactGradients if setup.plan.exact else WholeGradients
            strategy = make(setup, self._model, loss_scale)
        self._gradients = strategy.gradients
        self._check = strategy.check if isinstance(strategy, ExactGradients) else None
        optimizer = self._optimizer = self._model.make_optimizer()
        setup.observers.optimizer(optimizer, self._model.named)
        self._parameters = [parameter for _, parameter in self._model.named]
        self._closure_step: ClosureStep | None = None
        if needs_closure(optimizer):
            self._closure_step = ClosureStep(optimizer, self._parameters, setup.observers, self._model.copies)
            setup.carried.repeated = type(optimizer).__name__
        self._schedule = schedule_of(setup.task, optimizer, setup.total_steps)
        self.train_state = self._model.train_state(optimizer, self._schedule, loss_scale)
        self._group = optimizer.param_groups[0]
        self._step_optimizer = OptimizerStep(optimizer)
        self._clip = clipping(setup.task, setup.plan, loss_scale, self._parameters, strategy.norm)
        self._after_step = AfterStep(setup, self._model.module) if overrides(setup.task, "after_step") else None

    def step(self, batch: Batch) -> StepResult:
        lr = self._group["lr"]
        if self._closure_step is not None:
            skipped = False
            sums, norm = self._closure_step(lambda: self._clipped_gradients(batch)[:2], batch)
        else:
            sums, norm, skipped = self._clipped_gradients(batch)
            if not skipped:
                try:
                    self._step_optimizer()
                except (RuntimeError, NotImplementedError) as error:
                    if not any(words in str(error) for words in OF_DTENSORS):
                        raise
                    optimizer, why = self._optimizer, sentence(error).splitlines()[0]
                    raise TaskError(
                        f"{type(optimizer).__name__} cannot step parameters of which each process holds a part "
                        f"({why}): use replicate=, or another optimizer"
                    ) from error
        if self._schedule is not None and not skipped:
            self._schedule.step()
        # As optimizer.zero_grad(), less the 8 microseconds that its profiling takes.
        for parameter in self._parameters:
            parameter.grad = None
        if self._after_step is not None and not skipped:
            self._after_step(batch.step)
        return StepResult(batch, sums, norm, skipped, lr)

    def _clipped_gradients(self, batch: Batch) -> tuple[Sums, Tensor | None, bool]:
        sums = self._gradients(batch)
        self._on_phase(UPDATE)
        norm, skipped = self._clip() if self._clip is not None else (None, False)
        return sums, norm, skipped

    def remarks(self) -> Sequence[str]:
        held = "the optimizer calls a closure: every process holds whole copies of the weights, and its whole state"
        parts = [] if self._domain is None else list(self._domain.remarks())
        parts += [] if self._check is None else self._check.remarks()
        return [*compile_rules.remarks(self._plan), *parts, *([] if self._model.copies is None else [held])]

    def before_save(self) -> None:
        if self._check is not None:
            self._check.before_save()

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        return self._model.evaluate(batches, samples)


OF_DTENSORS = ("DTensor", "placement", "sharded tensor")
"""Words of torch where DTensor has no rule for what an optimizer computes."""


# ---- The model, whole on this process or sharded -----------------------------------------------------------


class WholeModel:
    """The task's model under the plan, with all its modules on this process."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self.module = parallelize(setup.task, setup.plan, setup.world, setup.weights, blocks=setup.blocks.names)
        self.named = trained_parameters(self.module)
        self.copies: WholeCopies | None = None
        """Whole weights, for an optimizer that calls a closure, where this process holds parts."""

    def make_optimizer(self) -> Optimizer:
        """Makes the task's optimizer over this process's parameters, or over whole copies of sharded ones.

        Raises:
            PlanError: it calls a closure, and the plan has fp16, or shards what it evaluates.
        """
        task, plan = self._setup.task, self._setup.plan
        optimizer = optimizer_of(task, self.named, closures=True)
        if not needs_closure(optimizer):
            return optimizer
        if plan.precision == "fp16":
            raise PlanError(
                f"precision=fp16 skips steps whose gradient overflows, and {type(optimizer).__name__} computes several "
                "gradients a step: use precision=bf16 or fp32"
            )
        self.copies = copies_of(self.named, self._setup.world)
        if self.copies is not None and has_modes(optimizer):
            raise PlanError(
                f"{type(optimizer).__name__} calls a closure and evaluates other weights than it trains, which is not "
                "supported for sharded weights: use replicate="
            )
        return optimizer if self.copies is None else optimizer_of(task, self.copies.named, closures=True)

    def train_state(self, optimizer: Optimizer, schedule: LRScheduler | None, loss_scale: LossScale) -> ModelState:
        """Returns the model's TrainState."""
        return ModelState(
            model=self.module,
            optimizer=optimizer,
            schedule=schedule,
            world=self._setup.world,
            loss_scale=loss_scale,
            stepped=None if self.copies is None else self.copies.named,
        )

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """Computes the scores over all data slices. Collective."""
        return evaluate(self.module, self._setup, batches, samples)


# ---- The gradients of a step -------------------------------------------------------------------------------


class WholeGradients:
    """Strategy with gradient accumulation: sums the microbatches' gradients, and reduces them over the processes."""

    def __init__(self, setup: EngineSetup, model: WholeModel, loss_scale: LossScale) -> None:
        self._parameters = [parameter for _, parameter in model.named]
        self._switch = reduction_switch(model.module, setup.plan) if setup.plan.uses_fsdp else None
        self._model, self._domain = model.module, setup.world.domain
        self._same: Callable[[], None] | None = None
        if self._domain is not None:
            self._same = SummedGradients(model.named, setup.world)
        elif setup.plan.shard > 1:
            self._same = SameParameters(model.named, setup.world)
        self._unwrapped: Replicas | None = None
        forward: Callable[[Any], Any] = functools.partial(setup.task.forward, model.module)
        divisor, summed_in = 1.0, stored_in(setup.plan)
        if setup.plan.uses_ddp:
            forward = self._unwrapped = Replicas(
                model.module, setup.world, setup.task.forward, summed_in, setup.plan.microbatches
            )
            divisor = float(setup.world.gradient_size)  # DDP averages where FSDP2 is made to sum
            if setup.plan.microbatches > 1:
                self._switch = self._unwrapped.reduce_in_next_backward
        self._precision = autocast(setup.plan.precision, setup.world.device)
        if setup.plan.cuda_graphs:
            forward = replaying(forward, keeps=setup.observers.output is not None)
        self._runner = MicrobatchRunner(
            setup,
            model.module,
            within(self._precision, forward),
            loss_scale=loss_scale,
            gradient_divisor=divisor,
            precision=self._precision,
            reduction=loss_reduction(setup.world, summed_in=summed_in),
        )

    def gradients(self, batch: Batch) -> Sums:
        """Leaves the global batch's gradient on each parameter; returns the step's (pending) sums. Collective."""
        runner = self._runner
        if self._unwrapped is not None:
            runner.reduction = self._unwrapped.wrap(
                lambda forward, reduction: runner.dry_run(batch, within(self._precision, forward), reduction)
            )
            self._unwrapped = None
        runner.begin(batch)
        last = batch.microbatches[-1]
        for micro in batch.microbatches:
            if self._switch is not None:
                self._switch(micro is last)
            runner.run(batch, micro, _backward)
        sums = runner.sums()  # DDP's reduction ends there
        if self._domain is not None:
            gather_state(self._model)
        if self._same is not None:
            self._same()
        return sums

    def norm(self) -> Tensor:
        """Computes the 2-norm of the whole gradient. Collective if parameters are sharded."""
        return gradient_norm(self._parameters)


class ExactGradients:
    """Strategy for exact plans: sums every piece's gradients in one order, so that no number of processes shows."""

    def __init__(self, setup: EngineSetup, model: WholeModel, loss_scale: LossScale) -> None:
        self._seed, self._stop = setup.task.seed, setup.stop
        parameters = [parameter for _, parameter in model.named]
        self._exact = exact_sums(model.module, parameters, setup.plan, setup.world, setup.task.forward)
        self._precision = autocast(setup.plan.precision, setup.world.device)
        self._runner = MicrobatchRunner(
            setup,
            model.module,
            within(self._precision, self._exact.forward),
            loss_scale=loss_scale,
            precision=self._precision,
        )
        self._parameters, self._model, self._device = parameters, model.module, setup.world.device
        self.check: CrossCheck | None = None
        if setup.plan.check and setup.world.data_size > 1:
            if setup.task.whole_batch_loss:
                raise PlanError("check= with a loss that compares samples of the whole batch is not supported")
            names = [name for name, _ in model.named]
            pieces = setup.plan.exact // setup.world.data_size
            self.check = CrossCheck(setup.plan.check, pieces, setup.world, self._again, names)

    def _again(self, batch: Batch, micro: Microbatch, place: int) -> list[Tensor | None]:
        """Computes the gradients of the global batch's piece `place`; nothing else changes."""
        runner, again = self._runner, within(self._precision, self._exact.forward_again)
        assert isinstance(runner.losses, Losses), "a loss over whole batches is refused"
        with nothing_changed(self._model, self._device):
            output = again(place, batch.step, self._seed, entering(micro))
            with self._precision:
                loss = runner.losses.dry_run(output, micro, batch, runner.scale)
            _backward(loss, NO_ROOTS)
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    def gradients(self, batch: Batch) -> Sums:
        """Leaves the global batch's gradient on each parameter; returns the step's sums. Collective."""
        exact, seed, runner, check = self._exact, self._seed, self._runner, self.check
        ahead = within(self._precision, exact.forward_ahead)
        totals = []
        runner.first_pass(batch, lambda index, micro: ahead(index, batch.step, seed, entering(micro)))
        for index, micro in enumerate(batch.microbatches):
            runner.total = None
            if micro.rows or exact.every_piece:
                with exact.piece(index, batch.step, seed):
                    runner.run(batch, micro, _backward)
            if check is not None:
                check.note(batch, index, [parameter.grad for parameter in self._parameters] if micro.rows else [])
            exact.add(runner.total)
            totals += [] if runner.total is None else [runner.total]
        if check is not None:
            check.after(batch.step)
        sums = exact.reduce(self._stop.flag, batch.samples)
        sums.own = totals
        return sums

    def norm(self) -> Tensor:
        """Computes the 2-norm of the whole gradient, exact to the bit. Collective if parameters are sharded."""
        return self._exact.norm()


def _backward(loss: Loss, roots: Roots) -> None:
    backward((loss.values, *roots[0]), (loss.output_gradient, *roots[1]))


ENGINE = Native
