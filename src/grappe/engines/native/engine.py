"""The native engine: DDP, FSDP2, tensor parallelism, pipelines and their products, on torch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from grappe.data.batch import Batch
from grappe.engines.base import COMMON, Engine, EngineSetup
from grappe.engines.native.whole import WholeGradients, WholeModel
from grappe.parallel import compile as compile_rules
from grappe.parallel.parallelize import KEYS
from grappe.parallel.pipeline import rules as pipeline_rules
from grappe.plan import Plan
from grappe.profiling.phases import UPDATE
from grappe.step.clip import clipping
from grappe.step.exact import rules as exact_rules
from grappe.step.fast_paths import OptimizerStep
from grappe.step.precision import LossScale, set_tf32
from grappe.step.reduction import Sums
from grappe.step.result import StepResult
from grappe.step.scores import Scores
from grappe.step.task_contract import schedule_of

if TYPE_CHECKING:
    from grappe.engines.native.staged_model import StagedModel


class Gradients(Protocol):
    """Strategy that computes the gradients of a step. All methods are collective."""

    def gradients(self, batch: Batch) -> Sums:
        """Leaves the global batch's gradient on each parameter; returns the step's sums, still being computed."""

    def norm(self) -> Tensor:
        """Computes the 2-norm of the whole gradient on the parameters: a scalar, the same on every process."""


class Native(Engine):
    """Updates the parameters; a strategy computes their gradients: whole, exact or pipelined."""

    supported_keys = COMMON | KEYS | {"pipeline", "schedule", "stages", "exact", "cuda_graphs"}
    about = "torch's own: DDP, FSDP2 (ZeRO 1-3), pipelines, tensor parallelism and their products"

    @classmethod
    def unsupported_reason(cls, plan: Plan) -> str | None:
        if plan.offload.startswith("nvme:"):
            return (
                "engine=native offloads to the CPU only: use offload=cpu, or an engine with offload to disk"
            )
        if plan.tensor > 1 and plan.batchnorm == "sync":
            return "batchnorm=sync with tensor parallelism is not supported: use batchnorm=local"
        rules = (exact_rules, pipeline_rules, compile_rules)
        return next((why for rule in rules if (why := rule.unsupported_reason(plan))), None)

    def __init__(self, setup: EngineSetup) -> None:
        self._on_phase, self._plan = setup.observers.phase, setup.plan
        set_tf32(setup.plan.precision)
        loss_scale = LossScale(setup.plan.precision)
        self._model, strategy = _spread(setup, loss_scale)
        self._gradients = strategy.gradients
        optimizer = self._model.make_optimizer()
        setup.observers.optimizer(optimizer, self._model.named)
        self._schedule = schedule_of(setup.task, optimizer, setup.total_steps)
        self.train_state = self._model.train_state(optimizer, self._schedule, loss_scale)
        self._group = optimizer.param_groups[0]
        self._step_optimizer = OptimizerStep(optimizer)
        self._parameters = [parameter for _, parameter in self._model.named]
        self._clip = clipping(setup.task, setup.plan, loss_scale, self._parameters, strategy.norm)

    def step(self, batch: Batch) -> StepResult:
        sums = self._gradients(batch)
        lr = self._group["lr"]
        self._on_phase(UPDATE)
        norm, skipped = self._clip() if self._clip is not None else (None, False)
        if not skipped:
            self._step_optimizer()
            if self._schedule is not None:
                self._schedule.step()
        # As optimizer.zero_grad(), less the 8 microseconds that its profiling takes.
        for parameter in self._parameters:
            parameter.grad = None
        return StepResult(batch, sums, norm, skipped, lr)

    def remarks(self) -> Sequence[str]:
        return compile_rules.remarks(self._plan)

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        return self._model.evaluate(batches, samples)


def _spread(setup: EngineSetup, loss_scale: LossScale) -> tuple[WholeModel | StagedModel, Gradients]:
    """Makes the model under the plan, and the strategy that computes its gradients. Collective."""
    if setup.plan.pipeline > 1:
        from grappe.engines.native.pipelined import PipelinedGradients
        from grappe.engines.native.staged_model import StagedModel

        staged = StagedModel(setup)
        return staged, PipelinedGradients(setup, staged, loss_scale)
    model = WholeModel(setup)
    if setup.plan.exact:
        from grappe.engines.native.exact import ExactGradients

        return model, ExactGradients(setup, model, loss_scale)
    return model, WholeGradients(setup, model, loss_scale)
