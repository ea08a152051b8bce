"""Lightning's strategies for torch's own parallelism, over processes that grappe has started."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from grappe.engines.lightning.steps import Item, Steps
from grappe.launch.world import World
from grappe.parallel.replicate import ddp_arguments
from grappe.parallel.shard import uses_shard


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


def choose(steps: Steps, first: Item) -> Strategy:
    """Chooses the strategy for a plan without offload. Collective."""
    plan, world = steps.setup.plan, steps.setup.world
    if world.size == 1:
        return Single(world.device)
    if uses_shard(plan) or plan.tensor > 1:
        split: Any = Split(data_parallel_size=plan.data_parallel, tensor_parallel_size=plan.tensor)
        return placed(split, world)
    reached = steps.dry_run(first, steps.loss)
    return placed(Replicated(**ddp_arguments(find_unused=not reached)), world)  # pyrefly: ignore


def placed(strategy: Any, world: World) -> Any:
    """Puts the strategy on this process's device; Trainer(devices=…) needs a device per process, and some share one."""
    strategy.parallel_devices = [world.device] * world.process.local_size
    return strategy
