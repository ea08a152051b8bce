"""One `Trainer.fit` over a training's parts: the module, the loader, the callback, the strategy and where it runs."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor

from grappe.data.batch import Batch
from grappe.engines.lightning import Item, Lightning
from grappe.loop import After
from grappe.prepare.replicate import ddp_arguments
from grappe.prepare.shard import uses_shard
from grappe.world import World

if TYPE_CHECKING:
    from torch.optim import Optimizer

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed"}


def fit(engine: Lightning, first: Item, batches: Iterator[Batch], after: After) -> None:
    """Has Lightning step through `batches`, calling `after` behind each step, until they end or it returns True.

    Args:
        first: rehearsed where there is DDP, see grappe.prepare.replicate.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # What it says there is about its own use of torch, and about ways to start processes.
        warnings.filterwarnings("ignore", module=r"lightning\.")
        trainer = make_trainer(engine, [Watchers(engine, first, after)], first)
        trainer.fit(Carrier(engine), train_dataloaders=Loader(engine, batches))
    # DDP's hooks on the parameters go with it, and it is held by cycles.
    del trainer
    gc.collect()


def make_trainer(engine: Lightning, callbacks: list[Callback], first: Item) -> Trainer:
    """A Trainer that has the plan's strategy and precision, and none of what grappe does itself."""
    plan, world = engine.plan, engine.world
    trainer = Trainer(
        accelerator=world.device.type,
        devices="auto",  # the strategy has them already
        num_nodes=-(-world.size // world.place.local_size),
        strategy=choose_strategy(engine, first),
        plugins=[Here(world)],
        precision=PRECISIONS[plan.precision] if plan.offload == "none" else None,  # pyrefly: ignore
        accumulate_grad_batches=plan.microbatches,
        max_epochs=1,  # one of its epochs holds all steps; ours are the ledger's
        callbacks=callbacks,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer._signal_connector = _NoSignals()  # type: ignore[assignment]
    return trainer


def choose_strategy(engine: Lightning, first: Item) -> Strategy:
    """Lightning's strategy for the engine's plan. Collective."""
    plan, world = engine.plan, engine.world
    if world.size == 1 and plan.offload == "none":
        return Single(world.device)
    strategy: Any
    if plan.offload != "none":
        from grappe.engines.lightning.stage3 import Stage3

        strategy = Stage3(engine)
    elif uses_shard(plan) or plan.tensor > 1:
        strategy = Split(data_parallel_size=plan.data_parallel, tensor_parallel_size=plan.tensor)
    else:
        reached = engine.rehearse(first, engine.loss)
        strategy = Replicated(**ddp_arguments(find_unused=not reached))  # pyrefly: ignore
    # Not through Trainer(devices=…), which wants as many devices as processes: some share one.
    strategy.parallel_devices = [world.device] * world.place.local_size
    return strategy


class Carrier(LightningModule):
    """What Lightning trains: the task's model, and hooks that call the engine."""

    def __init__(self, engine: Lightning) -> None:
        super().__init__()
        self.model = engine.model
        self._engine = engine

    def configure_model(self) -> None:
        """FSDP2 and tensor parallelism have been applied when the engine was made, before weights were read."""

    def configure_optimizers(self) -> Any:
        if self._engine.schedule is None:
            return self._engine.optimizer
        schedule = {"scheduler": self._engine.schedule, "interval": "step"}
        return {"optimizer": self._engine.optimizer, "lr_scheduler": schedule}

    def transfer_batch_to_device(self, batch: Item, device: torch.device, dataloader_idx: int) -> Item:
        return batch  # the feed has moved it

    def on_train_batch_start(self, batch: Item, batch_idx: int) -> None:
        self._engine.begin(batch)

    def training_step(self, batch: Item, batch_idx: int) -> Tensor:
        return self._engine.loss(batch)

    def configure_gradient_clipping(self, optimizer: Optimizer, *rest: Any, **options: Any) -> None:
        self._engine.clip()


class Watchers(Callback):
    """All our watchers, as one callback of Lightning's."""

    def __init__(self, engine: Lightning, first: Item, after: After) -> None:
        self._engine, self._first, self._after = engine, first, after

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, Replicated):
            step: Any = trainer.strategy.training_step
            with trainer.precision_plugin.forward_context():
                self._engine.rehearse(self._first, lambda item: step(item, 0))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Item, batch_idx: int
    ) -> None:
        result = self._engine.end(batch)
        if result is not None and self._after(result):
            trainer.should_stop = True


class Loader:
    """The microbatches of all steps in order.

    Its length is that of the whole training: given one, Lightning reads no batch before its turn, which would
    count as seen in what is saved. It ends where `batches` end.
    """

    def __init__(self, engine: Lightning, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self._length = engine.total_steps * engine.plan.microbatches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        for batch in self._batches:
            last = len(batch.microbatches) - 1
            for index, micro in enumerate(batch.microbatches):
                yield Item(batch, micro, index == last)


class _Stays:
    """When it is done, Lightning takes the model to the CPU: ours is evaluated and saved where it is."""

    def teardown(self) -> None:
        """Leaves everything as it is."""


class Single(_Stays, SingleDeviceStrategy):
    """One process."""


class Replicated(_Stays, DDPStrategy):
    """DDP, as Lightning makes it."""


class Split(_Stays, ModelParallelStrategy):
    """FSDP2 and tensor parallelism, as Lightning runs them."""


class Here(ClusterEnvironment):
    """Where this process stands, as grappe knows it; in Lightning's own, Slurm's would take our signals over."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise RuntimeError("the processes have met already")

    @property
    def main_port(self) -> int:
        raise RuntimeError("the processes have met already")

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
        return self._world.place.local_rank

    def node_rank(self) -> int:
        return self._world.rank // self._world.place.local_size


class _NoSignals:
    """In place of Lightning's handler of SIGTERM, which broadcasts from inside the handler. Ours stay."""

    received_sigterm = False

    def register_signal_handlers(self) -> None:
        pass

    def teardown(self) -> None:
        pass
