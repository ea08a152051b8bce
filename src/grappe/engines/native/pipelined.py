"""The native engine's strategy for pipelines: forward and backward of all stages, as a schedule orders them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grappe.data.batch import Batch, Microbatch
from grappe.engines.base import EngineSetup
from grappe.engines.native.staged_model import StagedModel
from grappe.engines.shared.first_pass import nothing_changed
from grappe.errors import PlanError
from grappe.parallel.batchnorm import buffers_restored
from grappe.parallel.pipeline.even import even, largest
from grappe.parallel.pipeline.replicas import sum_gradients
from grappe.parallel.pipeline.schedules import Runner
from grappe.parallel.shard import uses_shard
from grappe.profiling.phases import BACKWARD, FORWARD
from grappe.step.clip import gradient_norm
from grappe.step.fast_paths import seed_dropout
from grappe.step.precision import LossScale, autocast
from grappe.step.reduction import Sums, loss_reduction
from grappe.step.whole_batch_loss import WholeBatchLosses, make_losses


class PipelinedGradients:
    """Runs a step's microbatches through all stages, and sums the gradients over replicas of the pipeline."""

    def __init__(self, setup: EngineSetup, model: StagedModel, loss_scale: LossScale) -> None:
        self._setup, self._model, self._loss_scale = setup, model, loss_scale
        plan, world = setup.plan, setup.world
        self._place = world.coordinates()["pipeline"][0]
        self._parameters = [parameter for _, parameter in model.named]
        self._reduction = loss_reduction(world)
        self._losses = make_losses(setup.task, plan, world, setup.observers)
        if isinstance(self._losses, WholeBatchLosses) and len(model.stages) > 1:
            raise PlanError(
                f"schedule={plan.schedule} with whole_batch_loss: stages of one process take turns in another order "
                "than in the pass that gives the loss its outputs, and dropout would differ: take schedule=1f1b"
            )
        self._autocast = autocast(plan.precision, world.device)
        # Parameters and gradients of zero=1 are whole during a step: torch's stages then reduce them at its end.
        held = uses_shard(plan) and plan.zero == 1
        self._runner = Runner(plan.schedule, model.relay, world.device, self._loss, held)
        # Collectives inside a forward: whoever sees a new shape would be alone in sending one through.
        together = uses_shard(plan) or plan.batchnorm == "sync"
        self._together = together and world.data_group is not None
        self._replicas = None if uses_shard(plan) else world.data_group
        self._batch: Batch | None = None
        self._total: Tensor | None = None
        for stage in model.stages:  # what a schedule does between two forwards is backward, but for its waits
            stage.register_forward_pre_hook(lambda *_: setup.observers.phase(FORWARD))
            stage.register_forward_hook(lambda *_: setup.observers.phase(BACKWARD))

    def gradients(self, batch: Batch) -> Sums:
        """Leaves the global batch's gradient on each parameter; returns the step's (pending) sums. Collective."""
        plan, world = self._setup.plan, self._setup.world
        micros = even(batch.microbatches, largest(plan, batch.samples))
        if self._anybody(not self._model.relay.knows(micros[0])):
            self._learn(micros[0])
        seed_dropout(self._setup.task.seed, batch.step, world, self._place)
        self._batch, self._total = batch._replace(microbatches=micros), None
        if isinstance(self._losses, WholeBatchLosses):
            self._first_pass(self._batch, self._losses)
        self._runner.run(micros)
        self._batch = None
        if self._replicas is not None:
            sum_gradients(self._parameters, self._replicas)
        # Only the last stage has a loss, and the reduction takes it that all of a slice's processes have it.
        total = self._total * plan.pipeline if self._total is not None else self._reduction.zero
        self._reduction.start(total, self._setup.stop_requested())
        return self._reduction.sums()

    def _first_pass(self, batch: Batch, losses: WholeBatchLosses) -> None:
        """Runs all microbatches forward through all stages, for their outputs; no state changes. Collective."""
        with nothing_changed(self._model.module, self._setup.world.device):
            outputs = [output for _, output in self._model.relay.forward(batch.microbatches)]
            if outputs:
                with self._autocast:
                    losses.look_ahead(batch, outputs, self._loss_scale.value)
        self._model.reshard()

    def norm(self) -> Tensor:
        """Computes the 2-norm of the whole gradient, over all stages. Collective."""
        group = self._model.relay.group
        if not self._parameters:  # all that this stage has is frozen
            square = torch.zeros((), dtype=torch.float64, device=self._setup.world.device)
            dist.all_reduce(square, group=group)
            return square.sqrt().float()
        return gradient_norm(self._parameters, group)

    def _learn(self, micro: Microbatch) -> None:
        """Runs a microbatch of a new shape through all stages, so that every stage knows its input's shapes."""
        with buffers_restored(self._model.module):
            for _ in self._model.relay.forward([micro]):
                pass
        self._model.reshard()

    def _anybody(self, flag_here: bool) -> bool:
        """Returns whether the flag is set on any process that takes part in sending a new shape. Collective."""
        if not self._together:
            return flag_here
        flag = torch.tensor(float(flag_here))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._setup.world.control)
        return bool(flag)

    def _loss(self, output: Any, micro: Microbatch) -> Tensor:
        """Computes a microbatch's loss on the last stage: a scalar from which backward starts."""
        assert self._batch is not None
        with self._autocast:
            # Gradients are summed, by replicas too.
            loss = self._losses(output, micro, self._batch, self._loss_scale.value)
        self._total = loss.total if self._total is None else self._total + loss.total
        return loss.scalar()
