"""Runs one `Trainer.fit` over a training's parts: the module, the loader, the callback and the environment."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor
from torch.optim import Optimizer

from grappe.contrib.lightning.steps import Item, Parts
from grappe.data.batch import Batch
from grappe.launch.world import World
from grappe.parallel.replicate import ddp_arguments
from grappe.private_api.lightning import configured_optimizers, replace_signal_connector
from grappe.step.loss import After
from grappe.step.precision import autocast


class Half(Precision):
    """fp16 without Lightning's GradScaler, whose skipped steps would advance the schedule: TrainedModule skips both."""

    precision = "16-mixed"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def forward_context(self) -> AbstractContextManager[None]:
        """Context of the forward and the loss."""
        return autocast("fp16", self._device)


# Lightning converts nothing with "32-true": with fp64 the model and the batches are float64 already.
PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp64": "32-true"}


def fit(parts: Parts, batches: Iterator[Batch], after: After) -> None:
    """Lets Lightning take a step for each of `batches`; `after` follows each step. Ends if `after` returns True."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # What it says there is about its own use of torch, and about ways to start processes.
        warnings.filterwarnings("ignore", module=r"lightning\.")
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        trainer = make_trainer(parts, [Watchers(parts, after)])
        trainer.fit(TrainedModule(parts), train_dataloaders=Loader(parts, batches))
    # DDP's hooks on the parameters go with it, and it is held by cycles.
    del trainer
    gc.collect()


def make_trainer(parts: Parts, callbacks: list[Callback]) -> Trainer:
    """Makes a Trainer with the plan's strategy and precision, without features that grappe has itself. Collective."""
    plan, world = parts.setup.plan, parts.setup.world
    half = plan.precision == "fp16" and plan.offload == "none"
    trainer = Trainer(
        accelerator=world.device.type,
        devices="auto",  # the strategy has them already
        num_nodes=-(-world.size // world.process.local_size),
        strategy=choose(parts),
        plugins=[Here(world), *([Half(world.device)] if half else [])],
        precision=None if half or plan.offload != "none" else PRECISIONS[plan.precision],  # pyrefly: ignore
        accumulate_grad_batches=plan.microbatches,
        max_epochs=1,  # one of its epochs holds all steps of all of ours
        callbacks=callbacks,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    replace_signal_connector(trainer, _NoSignals())
    return trainer


class TrainedModule(LightningModule):
    """The module that Lightning trains: the task's model, and hooks that call the engine's steps."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.model = parts.model
        self._parts = parts

    def configure_model(self) -> None:
        """Does nothing: FSDP2 and tensor parallelism were applied when the engine was made, before reading weights."""

    def configure_optimizers(self) -> Any:
        if self._parts.schedule is None:
            return self._parts.optimizer
        schedule = {"scheduler": self._parts.schedule, "interval": "step"}
        return {"optimizer": self._parts.optimizer, "lr_scheduler": schedule}

    def transfer_batch_to_device(self, batch: Item, device: torch.device, dataloader_idx: int) -> Item:
        return batch  # the loader has moved it

    def on_train_batch_start(self, batch: Item, batch_idx: int) -> None:
        self._parts.begin(batch)

    def training_step(self, batch: Item, batch_idx: int) -> Tensor:
        return self._parts.loss(batch)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if not isinstance(self.trainer.precision_plugin, Half):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        optimizer_closure()
        self._parts.clip()
        if not self._parts.skipped:
            optimizer.optimizer.step()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if not self._parts.skipped:
            super().lr_scheduler_step(scheduler, metric)

    def configure_gradient_clipping(self, optimizer: Optimizer, *rest: Any, **options: Any) -> None:
        self._parts.clip()


class Watchers(Callback):
    """All of grappe's watchers, as one callback of Lightning."""

    def __init__(self, parts: Parts, after: After) -> None:
        self._parts, self._after = parts, after

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Item, batch_idx: int
    ) -> None:
        result = self._parts.end(batch)
        if result is not None and self._after(result):
            trainer.should_stop = True


class Loader:
    """The microbatches of all steps in order.

    The length is the whole training's: with a length, Lightning reads no batch ahead of its step, which would
    count as seen in a checkpoint. The iteration ends with `batches`.
    """

    def __init__(self, parts: Parts, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self._length = parts.setup.total_steps * parts.setup.plan.microbatches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        for batch in self._batches:
            last = len(batch.microbatches) - 1
            for index, micro in enumerate(batch.microbatches):
                yield Item(batch, micro, index == last)


class Here(ClusterEnvironment):
    """This process's rank and world size, from grappe: Lightning's SLURMEnvironment would replace signal handlers."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise RuntimeError("the process group is there already")

    @property
    def main_port(self) -> int:
        raise RuntimeError("the process group is there already")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world.size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._world.process.local_rank

    def node_rank(self) -> int:
        return self._world.rank // self._world.process.local_size


class _NoSignals:
    """Replaces Lightning's SIGTERM handler, which broadcasts inside the handler; grappe's handlers stay."""

    received_sigterm = False

    def register_signal_handlers(self) -> None:
        pass

    def teardown(self) -> None:
        pass


class _Stays:
    """Keeps the model on its device: Lightning would move it to the CPU at the end, before evaluation and saving."""

    def teardown(self) -> None:
        """Does nothing: the model stays on its device."""


class Single(_Stays, SingleDeviceStrategy):
    """Strategy for one process."""


class Replicated(_Stays, DDPStrategy):
    """Strategy with DDP, as Lightning makes it."""


class Split(_Stays, ModelParallelStrategy):
    """Strategy with FSDP2 and tensor parallelism, as Lightning runs them."""


def choose(parts: Parts) -> Strategy:
    """Chooses the plan's strategy."""
    plan, world = parts.setup.plan, parts.setup.world
    if plan.offload != "none":
        return placed(Stage3(parts.forward), world)
    if world.size == 1:
        return Single(world.device)
    if plan.uses_fsdp or plan.tensor > 1:
        split: Any = Split(data_parallel_size=plan.data_parallel, tensor_parallel_size=plan.tensor)
        return placed(split, world)
    return placed(Replicated(**ddp_arguments(find_unused=True)), world)  # pyrefly: ignore


def placed(strategy: Any, world: World) -> Any:
    """Puts the strategy on this process's device; Trainer(devices=…) needs a device per process, and some share one."""
    strategy.parallel_devices = [world.device] * world.process.local_size
    return strategy


class AsItIs(DeepSpeedPrecision):
    """DeepSpeed's backward and step in the form that Lightning calls; batches keep their counts unconverted."""

    def convert_input(self, data: Any) -> Any:
        return data


class Stage3(_Stays, DeepSpeedStrategy):
    """Lightning's strategy, on CPUs too; DeepSpeed is initialized already, with settings checked against the plan.

    Args:
        engine: DeepSpeed's engine.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(config={"zero_optimization": {"stage": 3}}, precision_plugin=AsItIs("32-true"))
        self._engine = engine

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.optimizers, self.lr_scheduler_configs = configured_optimizers(self.lightning_module)
        self.model = self._engine

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        assert self.lightning_module is not None
        return self.lightning_module.training_step(*arguments, **options)  # pyrefly: ignore
