"""The TrainState of a model in DeepSpeed's engine: whole for ZeRO 0, partitioned for ZeRO 1 to 3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe.engines.deepspeed.optimizer import counting_as
from grappe.engines.deepspeed.state import Partitioned
from grappe.engines.shared.state import (
    ModelState,
    SavedState,
    State,
    export,
    own_buffers,
    position,
    replay,
    restore_buffers,
)
from grappe.launch.world import World
from grappe.step.precision import LossScale


class WholeState:
    """A ModelState whose optimizer may be DeepSpeed's own."""

    def __init__(self, own: ModelState, optimizer: Optimizer) -> None:
        self._own, self._optimizer = own, optimizer

    def state(self) -> State:
        """Returns the state to save."""
        return self._own.state()

    def restore(self, saved: SavedState) -> None:
        """Restores a state that `state` returned."""
        self._own.restore(counting_as(saved, self._optimizer))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields whole parameters and buffers. Collective."""
        return self._own.export()

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside, parameters have the values that the optimizer wants evaluated and saved."""
        return self._own.evaluated_weights()


class PartitionedState:
    """The state of a model whose parameters and optimizer state are partitioned over processes; buffers are not."""

    def __init__(
        self,
        partitioned: Partitioned,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        world: World,
        loss_scale: LossScale,
    ) -> None:
        self._partitioned, self._model, self._optimizer = partitioned, model, optimizer
        self._schedule, self._world, self._loss_scale = schedule, world, loss_scale

    def state(self) -> State:
        """Returns the state to save: shapes, and a stream of whole tensors."""
        values: dict[str, Any] = {
            "optimizer": self._partitioned.plain(),
            "scale": self._loss_scale.state(),
            **position(self._schedule, self._world),
        }
        return State(
            tensors=self._partitioned.shapes(),
            local=own_buffers(self._model, self._world),
            values=values,
            stream=self._partitioned.values,
        )

    def restore(self, saved: SavedState) -> None:
        """Restores a state that `state` returned, or another engine's state. Collective."""
        restore_buffers(self._model, self._world, saved)
        self._partitioned.restore(counting_as(saved, self._optimizer))
        replay(self._schedule, saved)
        self._loss_scale.restore(saved.values.get("scale", {}))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields whole parameters and buffers, one at a time. Collective."""
        return export(self._model, self._world, self._partitioned.gathered)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Changes nothing: optimizers with other weights to evaluate are refused where parameters are flattened."""
        return nullcontext()
