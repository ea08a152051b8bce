"""Lightning's strategies for what torch itself spreads, over processes that grappe has started."""

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
    """When it is done, Lightning takes the model to the CPU: ours is evaluated and saved where it is."""

    def teardown(self) -> None:
        """Leaves everything as it is."""


class Single(_Stays, SingleDeviceStrategy):
    """One process."""


class Replicated(_Stays, DDPStrategy):
    """DDP, as Lightning makes it."""


class Split(_Stays, ModelParallelStrategy):
    """FSDP2 and tensor parallelism, as Lightning runs them."""


def choose(steps: Steps, first: Item) -> Strategy:
    """The strategy for a plan without offload. Collective."""
    plan, world = steps.setup.plan, steps.setup.world
    if world.size == 1:
        return Single(world.device)
    if uses_shard(plan) or plan.tensor > 1:
        split: Any = Split(data_parallel_size=plan.data_parallel, tensor_parallel_size=plan.tensor)
        return placed(split, world)
    reached = steps.dry_run(first, steps.loss)
    return placed(Replicated(**ddp_arguments(find_unused=not reached)), world)  # pyrefly: ignore


def placed(strategy: Any, world: World) -> Any:
    """The strategy on this process's device; Trainer(devices=…) wants as many as processes, and some share one."""
    strategy.parallel_devices = [world.device] * world.process.local_size
    return strategy
