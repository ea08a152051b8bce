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
    - `after_loss(output, micro, named_losses)` after the loss of each training microbatch, with the sums of its named
      losses. It calls `output` with each microbatch, and `named_losses` only where losses have names. `output` is None
      if nobody asks for outputs, so that an engine need not keep them.
    """

    def __init__(
        self,
        *,
        phase: Sequence[OnPhase] = (),
        optimizer: Sequence[OnOptimizer] = (),
        output: Sequence[OnOutput] = (),
        named_losses: Sequence[OnOutput] = (),
    ) -> None:
        self.phase: OnPhase = _calling(phase)
        self.optimizer: OnOptimizer = _calling(optimizer)
        self.output: OnOutput | None = _calling(output) if output else None
        self.named_losses: OnOutput = _calling(named_losses)
        self.muted = False
        """Whether losses are not passed on, since the step's batch was seen already."""

    def after_loss(self, output: Any, micro: Microbatch, named: Mapping[str, Tensor]) -> None:
        """Passes on a training microbatch's output, and the sums of its named losses."""
        if self.muted:
            return
        if self.output is not None:
            self.output(output, micro, named)
        if named:
            self.named_losses(output, micro, named)


def _calling(callbacks: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """Returns a function that calls each of `callbacks`; a single one is returned as it is, which is quicker."""
    if len(callbacks) == 1:
        return callbacks[0]

    def call(*arguments: Any) -> None:
        for callback in callbacks:
            callback(*arguments)

    return call
