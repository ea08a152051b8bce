"""DeepSpeedModel: the task's model and optimizer in DeepSpeed's engine, for any training loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from grappe.data.batch import Batch
from grappe.engines.base import EngineSetup
from grappe.engines.deepspeed import disk, library, optimizer, settings
from grappe.engines.deepspeed.partition import partitioned
from grappe.engines.deepspeed.reached import Reached
from grappe.engines.deepspeed.state import Partitioned
from grappe.engines.deepspeed.train_state import PartitionedState, WholeState
from grappe.engines.shared.microbatch import evaluate
from grappe.engines.shared.state import ModelState, TrainState, trained_parameters
from grappe.errors import TaskError
from grappe.parallel.activation_checkpointing import checkpoint_activations, switch_off_caches
from grappe.parallel.batchnorm import synchronise_batchnorm
from grappe.parallel.materialise import fill, on_meta
from grappe.step.precision import LossScale, autocast
from grappe.step.scores import Scores
from grappe.step.task_contract import optimizer_of, schedule_of
from grappe.task import Call


class DeepSpeedModel:
    """A model, its optimizer and schedule, as passed to `deepspeed.initialize`. All methods are collective."""

    train_state: TrainState

    def __init__(self, setup: EngineSetup, loss_scale: LossScale) -> None:
        self._setup = setup
        self.stage = settings.stage(setup.plan)
        self._deepspeed = library.load(setup.world)
        self._communication = library.Communication(setup.world)
        if setup.plan.offload != "none":
            library.return_memory()
        self._scratch = disk.Scratch(setup.plan, setup.world)
        with library.linear(zero3=False):
            self.module, config = self._make_model()
            # A context of its own: evaluation is inside another already, and neither may be entered twice.
            self._carrier = _Carrier(
                self.module, autocast(setup.plan.precision, setup.world.device), setup.task.forward
            )
            self._initialize(config, loss_scale)
        self._carrier.train()

    def _make_model(self) -> tuple[nn.Module, settings.Settings]:
        """Makes the model with its values, partitioned under ZeRO 3, and DeepSpeed's settings."""
        task, plan, world, weights = (
            self._setup.task,
            self._setup.plan,
            self._setup.world,
            self._setup.weights,
        )
        model = on_meta(task)
        _refuse_scalars(model)
        if task.ema is not None and self.stage == 3:
            raise TaskError(
                f"ema={task.ema}: DeepSpeed's stage 3 keeps parts of the weights where no average can be taken: use "
                "zero=2, or engine=native, which averages sharded weights"
            )
        sizes = [parameter.numel() for parameter in model.parameters()]
        cuda = world.device.type == "cuda"
        config = settings.settings(plan, task, sum(sizes), max(sizes, default=1), cuda)
        self._scratch.make(sum(sizes), config)
        switch_off_caches(model, plan)
        checkpoint_activations(list(task.units(model)) or [model], plan)
        if self.stage == 3:
            partitioned(model, weights, world.device, config)
        else:
            fill(model, weights, world.device)
        if plan.batchnorm == "sync" and world.data_group is not None:
            synchronise_batchnorm(model, world.data_group)
        return model, config

    def _initialize(self, config: settings.Settings, loss_scale: LossScale) -> None:
        task, plan, world = self._setup.task, self._setup.plan, self._setup.world
        self.named = trained_parameters(self.module)
        self.reached = Reached(self.module, self.stage, world)
        given = optimizer_of(task, self.named)
        optimizer.check_elementwise(given, self.stage)
        self.optimizer, words = optimizer.chosen(given, plan, world)
        self._setup.observers.optimizer(self.optimizer, self.named)
        self.remark = f"DeepSpeed {self._deepspeed.__version__}, ZeRO {self.stage}, {words}"
        self.engine, wrapped, *_ = self._deepspeed.initialize(
            model=self._carrier, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        # After it has dropped groups without parameters.
        self.schedule = schedule_of(task, self.optimizer, self._setup.total_steps)
        self.train_state = self._train_state(wrapped, loss_scale)

    def _train_state(self, wrapped: Any, loss_scale: LossScale) -> TrainState:
        world = self._setup.world
        parts: dict[str, Any] = {
            "model": self.module,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "world": world,
            "loss_scale": loss_scale,
        }
        if not self.stage:
            return WholeState(ModelState(**parts), self.optimizer)
        return PartitionedState(Partitioned(self.module, wrapped, self.stage, world.rank), **parts)

    def forward(self, inputs: Any) -> Any:
        """Computes the model's output, without DeepSpeed's engine around it."""
        return self._carrier(inputs)

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """Computes the scores over all data slices."""
        return evaluate(self._carrier, self._setup, batches, samples, self._carrier)

    def close(self) -> None:
        """Ends DeepSpeed's engine, and frees its memory."""
        self.engine.destroy()
        # What it is made of refers to itself: its memory, and what its destructors do, must not wait for later.
        del self.engine, self._carrier, self.module, self.train_state, self.named
        gc.collect()
        self._communication.leave()
        self._scratch.close()


def _refuse_scalars(model: nn.Module) -> None:
    """DeepSpeed 0.19 sends each parameter's bytes to all processes, and a scalar cannot be seen as bytes."""
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if scalars:
        raise TaskError(
            f"DeepSpeed takes no scalar parameter, and the model has {', '.join(scalars[:3])}: make it one of shape "
            "[1], or use engine=native, which keeps scalars whole"
        )


class _Carrier(nn.Module):
    """The model in the plan's precision: DeepSpeed switches off an autocast context around its engine."""

    def __init__(self, model: nn.Module, precision: AbstractContextManager[Any], call: Call) -> None:
        super().__init__()
        self.model, self._precision, self._call = model, precision, call

    def forward(self, inputs: Any) -> Any:
        with self._precision:
            return self._call(self.model, inputs)
