"""Observers: callbacks by which clocks, meters and averages follow a training's steps on every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from grappe.data.batch import Microbatch

OnPhase = Callable[[int], None]
NamedParameters = Sequence[tuple[str, nn.Parameter]]
OnOptimizer = Callable[[Optimizer, NamedParameters], None]
OnOutput = Callable[[Any, Microbatch, Mapping[str, Tensor]], None]


class Observers:
    """The callbacks of a training's steps; each kind may have several, which are called in their order.

    An engine calls:

    - `phase(number)` at the start of a phase: FORWARD with each microbatch, BACKWARD when the loss's values are there,
      UPDATE before clipping and stepping, COMMUNICATION before a wait that is not torch.distributed's;
    - `optimizer(optimizer, named_parameters)` once, with the optimizer that steps, and this process's trained
      parameters;
    - `output(output, micro, named_losses)` after the loss of each training microbatch, with the sums of its named
      losses; None if nobody asks for outputs, so that an engine need not keep them.
    """

    def __init__(
        self,
        *,
        phase: Sequence[OnPhase] = (),
        optimizer: Sequence[OnOptimizer] = (),
        output: Sequence[OnOutput] = (),
    ) -> None:
        self.phase: OnPhase = _calling(phase)
        self.optimizer: OnOptimizer = _calling(optimizer)
        self.output: OnOutput | None = _calling(output) if output else None


def _calling(callbacks: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """Returns a function that calls each of `callbacks`; a single one is returned as it is, which is quicker."""
    if len(callbacks) == 1:
        return callbacks[0]

    def call(*arguments: Any) -> None:
        for callback in callbacks:
            callback(*arguments)

    return call
