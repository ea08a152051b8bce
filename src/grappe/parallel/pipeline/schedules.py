"""Runner: the schedules of torch.distributed.pipelining, an alpha interface of torch that only this file uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from grappe.data.batch import Microbatch, entering
from grappe.errors import PlanError
from grappe.parallel.pipeline.rules import RULES
from grappe.parallel.pipeline.stage import Relay, Stage, key_of
from grappe.private_api.torch import tree_unflatten

STEP = inspect.signature(schedules.PipelineScheduleSingle.step)
RETURN_NOTHING = {"return_outputs": False} if "return_outputs" in STEP.parameters else {}
"""Older releases of torch (2.8) always put the microbatches' outputs together."""

Loss = Callable[[Any, Microbatch], Tensor]
"""A microbatch's output to the scalar that backward starts from."""


class Runner:
    """Runs one step's forward and backward passes in the order of a schedule.

    Args:
        stays_gathered: whether FSDP's parameters and gradients stay gathered in a step, and are reduced at its end.
    """

    def __init__(self, schedule: str, relay: Relay, device: torch.device, loss: Loss, stays_gathered: bool) -> None:
        self._class = getattr(schedules, RULES[schedule].torch_name)
        self._single = issubclass(self._class, schedules.PipelineScheduleSingle)
        self._relay, self._device, self._loss, self._stays_gathered = relay, device, loss, stays_gathered
        self._made: tuple[tuple, Any] = (), None
        """The shape of the last step's microbatches, and their schedule, which holds buffers for what it receives."""
        self._micros: Sequence[Microbatch] = ()
        for stage in relay.stages:
            if stage.is_first:
                stage.source = self._inputs

    def run(self, micros: Sequence[Microbatch]) -> None:
        """Runs forward and backward of all microbatches, which have one shape. Collective over the pipeline."""
        self._micros = micros
        schedule = self._schedule(micros)
        numbers = torch.arange(len(micros))
        first = any(stage.is_first for stage in self._relay.stages)
        last = any(stage.is_last for stage in self._relay.stages)
        try:
            schedule.step(*((numbers,) if first else ()), target=numbers if last else None, **RETURN_NOTHING)
        except RuntimeError as error:
            # torch wraps a stage's exception into a message of its own.
            raise error.__cause__ or error from error.__cause__
        finally:
            self._micros = ()

    def _schedule(self, micros: Sequence[Microbatch]) -> Any:
        """Returns the schedule for microbatches of this shape; frees the schedule of another shape, with its buffers.

        Each change of shape makes a new schedule: 0.2 ms for 1f1b, 11 to 21 ms for interleaved and zero_bubble with 32
        microbatches, and two messages of a byte from stage to stage. Buffers that stayed took half a peak, once.
        """
        key = len(micros), *key_of(micros[0].inputs)
        if self._made[0] == key:
            return self._made[1]
        self._made = (), None
        stages = [self._stage(stage, micros[0]) for stage in self._relay.stages]
        try:
            made = self._class(
                stages[0] if self._single else stages,
                n_microbatches=len(micros),
                loss_fn=self._loss_of,
                scale_grads=False,
            )
        except ValueError as error:  # torch 2.8 has more rules than pipeline/rules.py
            raise PlanError(f"torch {torch.__version__}: {error}") from error
        self._made = key, made
        return made

    def _stage(self, stage: Stage, micro: Microbatch) -> PipelineStage:
        header = self._relay.header(stage.number, micro, stage.training)
        if stage.is_first:
            received: tuple[Tensor, ...] = (torch.zeros(1, dtype=torch.int64),)
        else:
            received = _like(self._relay.header(stage.number - 1, micro, stage.training).empty("meta"))
        return _Announcing(
            self._enter,
            stage if self._stays_gathered else _Closed(stage),
            stage.number,
            stage.count,
            self._device,
            input_args=received,
            output_args=_like(header.empty("meta")),
            group=self._relay.group,
        )

    def _enter(self, number: int) -> None:
        entering(self._micros[number])

    def _inputs(self, number: Tensor) -> Any:
        """Returns the inputs of the microbatch whose number the schedule passes to the first stage."""
        return self._micros[int(number)].inputs

    def _loss_of(self, output: Any, number: Tensor) -> Tensor:
        stage = self._relay.stages[-1]
        assert stage.leaving is not None
        leaves = output if isinstance(output, tuple) else (output,)
        micro = self._micros[int(number)]
        entering(micro)
        return self._loss(tree_unflatten(list(leaves), stage.leaving), micro)


class _Announcing(PipelineStage):
    """A torch stage that announces, before each forward, its microbatch: other stages get only tensors."""

    def __init__(self, enter: Callable[[int], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._enter = enter

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._enter(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


class _Closed(nn.Module):
    """Hides FSDP from torch's stage, so that FSDP's own hooks shard and reduce at each microbatch."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        return self.stage(*leaves)


def _like(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Makes every tensor that can have a gradient require one: stages exchange a fixed set of messages."""
    return tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in tensors)
